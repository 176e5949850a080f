"""The recipe of drafts that skip layers: given or searched, alone or on quantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from nested_models import assert_same_model, logits, nest_
from quantized_models import RECIPE, neox
from speculative_runs import run
from test_quantize_refusals import assert_unchanged, snapshot
from torch import Tensor
from transformers import PreTrainedModel

import nestq
from nestq import draft_and_verify, quantize_
from nestq.architectures import UnsupportedArchitectureError
from nestq.hf_quantizer import attach
from nestq.kv_policy import default_policy
from nestq.layer_skipping import skipped_in_draft
from nestq.skipping_recipe import SkippingRecipe

GIVEN = {"attention": [0, 2], "mlp": [1]}


def dense(**options: Any) -> PreTrainedModel:
    model = small_models.build("llama-gqa", num_hidden_layers=3, **options)
    model.generation_config.eos_token_id = None
    return model


def useless_mlp() -> PreTrainedModel:
    """A model with an MLP that does nothing."""
    model = dense()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    return model


def texts(model: PreTrainedModel) -> Tensor:
    return small_models.tokens(model, 4, 80)


def searching(**options: Any) -> SkippingRecipe:
    return draft_and_verify(**{"tokens": 128, "gamma": 3, **options})


def test_given_layers_are_skipped_as_they_are() -> None:
    model = dense()
    target = logits(model, "target")
    report = quantize_(model, draft_and_verify([2, 0], mlp=[1]))

    assert skipped_in_draft(model) == GIVEN
    assert torch.equal(logits(model, "target"), target)
    assert not torch.equal(logits(model, "draft"), target)
    assert report.linears == ()
    assert report.notes == ["the draft skips attention of layers 0, 2 and mlp of layers 1"]
    assert str(default_policy(model)) == "16/16"


def test_one_kind_alone_may_be_given() -> None:
    model = dense()
    quantize_(model, draft_and_verify(mlp=[1]))

    assert skipped_in_draft(model) == {"attention": [], "mlp": [1]}


def test_decoding_is_that_of_the_target() -> None:
    model = dense()
    tokens = small_models.tokens(model, 2, 8)
    alone = run(model, tokens, 0, max_new_tokens=6)
    quantize_(model, draft_and_verify(**GIVEN))

    assert torch.equal(run(model, tokens, 3, max_new_tokens=6).sequences, alone.sequences)


def test_layers_are_searched_on_calibration() -> None:
    model = useless_mlp()
    report = quantize_(model, searching(), calibration=texts(model), progress=False)

    assert 1 in skipped_in_draft(model)["mlp"]
    assert report.seconds.keys() == {"layer search"}
    (note,) = report.notes
    assert note.startswith("the draft skips ")
    assert "tokens a round of gamma 3" in note


def test_the_seed_chooses_the_text() -> None:
    results = []
    for seed in (0, 0, 1):
        model = dense()
        with pytest.warns(UserWarning, match="times the speed of the target alone"):
            report = quantize_(
                model, searching(seed=seed), calibration=texts(model), progress=False
            )
        results.append((skipped_in_draft(model), report.notes))

    assert results[0] == results[1]
    assert results[0] != results[2]


def test_weights_come_first() -> None:
    model, plain = dense(), dense()
    options = {"calibration": small_models.tokens(model, 8, 64), "progress": False}
    weights = quantize_(plain, RECIPE, **options)
    report = quantize_(model, draft_and_verify(**GIVEN, weights=RECIPE), **options)

    assert_same_model(model, plain)
    assert skipped_in_draft(model) == GIVEN
    assert report.linears == weights.linears
    assert report.notes[:-1] == weights.notes
    assert default_policy(model) == default_policy(plain)
    assert torch.equal(logits(model, "target"), logits(plain, "target"))
    assert not torch.equal(logits(model, "draft"), logits(plain, "draft"))
    assert model.config.quantization_config.recipe["weights"] == RECIPE.to_dict()


def test_a_model_that_is_quantized_keeps_what_is_known_of_it() -> None:
    model = nest_(dense())
    attach(model, {"name": "nearest"}, {"notes": ["made"], "linears": []}, kv="kv4/kv8")
    quantize_(model, draft_and_verify(**GIVEN))

    config = model.config.quantization_config
    assert config.recipe["name"] == "draft_and_verify"
    assert config.recipe["weights"] == {"name": "nearest"}
    assert config.report["linears"] == []
    assert config.report["notes"][0] == "made"
    assert config.report["notes"][1].startswith("the draft skips")
    assert str(default_policy(model)) == "kv4/kv8"


def test_a_policy_becomes_the_default() -> None:
    model = dense()
    quantize_(model, draft_and_verify(**GIVEN, kv="16/16+streaming(4,60)"))

    assert str(default_policy(model)) == "16/16+streaming(4,60)"


@pytest.mark.parametrize("nested", [False, True])
def test_saved_models_skip_the_same(tmp_path: Path, nested: bool) -> None:
    model = dense(dtype=torch.bfloat16)
    if nested:
        nest_(model)
    quantize_(model, draft_and_verify(**GIVEN))
    nestq.save(model, tmp_path / "model")
    loaded = nestq.load(tmp_path / "model")

    assert_same_model(loaded, model)
    assert skipped_in_draft(loaded) == GIVEN
    for view in ("draft", "target"):
        assert torch.equal(logits(loaded, view), logits(model, view))
    assert default_policy(loaded) == default_policy(model)


def test_options_are_json() -> None:
    recipe = draft_and_verify([3, 1], weights=RECIPE, seed=5)

    assert json.loads(json.dumps(recipe.to_dict())) == {
        "name": "draft_and_verify",
        "attention": [1, 3],
        "mlp": None,
        "weights": RECIPE.to_dict(),
        "gamma": 4,
        "tokens": 1024,
        "kv": None,
        "seed": 5,
    }


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": [], "mlp": []}, ValueError, "attention and mlp must name a layer to skip"),
        ({"attention": []}, ValueError, "attention and mlp must name a layer to skip"),
        ({"attention": [1, 1]}, ValueError, "attention must name each layer once, got 1 twice"),
        ({"mlp": [True]}, ValueError, "mlp: a layer index must be an int >= 0, got True"),
        ({"mlp": 3}, TypeError, "mlp must be a list of layer indices, got int 3"),
        ({"weights": "w8a8"}, TypeError, "weights must be a recipe .* got str"),
        ({"weights": nestq.w8a8()}, TypeError, "weights must be a recipe .* got W8A8Recipe"),
        ({"gamma": 0}, ValueError, "gamma must be an int from 1 to 16, got 0"),
        ({"tokens": 0}, ValueError, "tokens must be an int >= 1, got 0"),
        ({"kv": "kv3"}, ValueError, "kv: the KV policy must be"),
        ({"seed": -1}, ValueError, "seed must be an int from 0"),
    ],
)
def test_bad_options_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draft_and_verify(**options)


@pytest.mark.parametrize(
    ("recipe", "options", "error", "message"),
    [
        (draft_and_verify([3]), {}, ValueError, "attention must be layer indices from 0 to 2"),
        (
            draft_and_verify([0, 1, 2], [0, 1, 2]),
            {},
            ValueError,
            "attention and mlp must leave a sublayer",
        ),
        (draft_and_verify(), {}, ValueError, "calibration must be given to draft_and_verify"),
        (draft_and_verify(), {"calibration": [[200]]}, ValueError, "calibration has token ids"),
        (draft_and_verify(), {"calibration": 5}, TypeError, "calibration must be a list"),
        (
            draft_and_verify(),
            {"calibration": [[1]], "batch_size": 0},
            ValueError,
            "batch_size must be",
        ),
        (
            draft_and_verify(),
            {"calibration": ["a"], "tokenizer": 1},
            TypeError,
            "tokenizer must be a transformers tokenizer",
        ),
        (
            draft_and_verify(),
            {"calibration": [[1]], "device": "cpu"},
            ValueError,
            "device does not apply to draft_and_verify",
        ),
        (
            draft_and_verify([0]),
            {"calibration": [[1]]},
            ValueError,
            "calibration does not apply to draft_and_verify",
        ),
    ],
)
def test_what_cannot_be_applied_leaves_the_model(
    recipe: SkippingRecipe, options: Any, error: type[Exception], message: str
) -> None:
    model = dense()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        quantize_(model, recipe, progress=False, **options)

    assert_unchanged(model, before)
    assert skipped_in_draft(model) == {"attention": [], "mlp": []}


def test_bad_layers_are_refused_before_weights_are_quantized() -> None:
    model = dense()
    before = snapshot(model)
    with pytest.raises(ValueError, match="mlp must be layer indices from 0 to 2, got 9"):
        quantize_(model, draft_and_verify(mlp=[9], weights=RECIPE))

    assert_unchanged(model, before)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="gpt_neox"):
        quantize_(neox(), draft_and_verify(), calibration=[[1, 2]])


def test_a_context_without_room_is_refused() -> None:
    model = dense(max_position_embeddings=64)
    with pytest.raises(ValueError, match="model must have a context of more than 64 tokens"):
        quantize_(model, draft_and_verify(), calibration=texts(model), progress=False)
