"""``quantize_`` with calibration: every family, every option, and what is left of the model."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nested_models
import pytest
import small_models
import torch
from quantized_models import RECIPE, budget, calibration, distance, logits, quantized
from test_calibration import assert_no_trace, letters
from torch import Tensor, nn
from transformers import PreTrainedModel

import nestq
from nestq import bitnest_w4w8, quantize_
from nestq.architectures import describe
from nestq.hf_quantizer import nested_weights
from nestq.quantize import UNCALIBRATED
from nestq.reference.weights import unpack_base


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_every_family(family: str, tied: bool) -> None:
    model = small_models.build(family, tied=tied)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    report = quantize_(model, RECIPE, calibration=calibration(model), progress=False)

    architecture = describe(model)
    names = [*dict(architecture.named_linears()), "lm_head"]
    assert [entry.name for entry in report.linears] == names
    assert set(nested_weights(model)) == set(names)
    assert report.calibration_tokens == report.hessian_tokens == 16 * 64
    assert report.notes == []
    assert type(architecture.embedding.weight) is nn.Parameter
    assert model.config.tie_word_embeddings is False
    assert_no_trace(model)
    for entry in report.linears:
        # The largest of 32 normal weights is 2.1 times their RMS. So a base step is 0.3 of it, and
        # rounding errs by 0.3 / sqrt(12) = 0.09; compensation lowers that.
        assert entry.target_error < entry.draft_error < 0.09, entry
        assert entry.damping == RECIPE.damping
        assert entry.dead_columns == 0

    target = nested_models.logits(model, "target")
    assert torch.equal(target, logits(model, tokens))
    draft = nested_models.logits(model, "draft")
    assert distance(target, expected) < budget(report)
    # A target step is an eighth of a base step; INT8 activations add as much again.
    assert distance(target, expected) < 0.5 * distance(draft, expected)

    sequences = [
        nestq.speculative_generate(model, tokens[:1, :8], gamma=gamma, max_new_tokens=12)
        for gamma in (0, 4)
    ]
    assert torch.equal(sequences[0], sequences[1])
    assert sequences[0].shape[1] > 8


def test_the_three_lines() -> None:
    model = small_models.build("llama-gqa")
    eager = small_models.tokens(model, 1, 8)
    quantize_(model, RECIPE, calibration=["abc" * 30, "hgfe" * 30], tokenizer=letters())
    expected = nestq.speculative_generate(model, eager, max_new_tokens=8)
    compiled = torch.compile(model, backend="eager")
    output = nestq.speculative_generate(compiled, eager, max_new_tokens=8)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 128},
        {"refinement": "closed_form"},
        {"rotation": "none"},
        {"quantize_head": False},
        {"scale_dtype": "float32", "overlap": 12},
        {"tuning_steps": 2, "tune_codes": True},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_options(options: dict[str, Any], tied: bool) -> None:
    model = small_models.build("qwen2", tied=tied)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    recipe = bitnest_w4w8(**{"group_size": 32, **options})
    report = quantize_(model, recipe, calibration=calibration(model), progress=False)
    assert distance(logits(model, tokens), expected) < budget(report)
    draft = nested_models.logits(model, "draft")
    assert distance(logits(model, tokens), expected) < distance(draft, expected)
    assert ("lm_head" in nested_weights(model)) == recipe.quantize_head
    assert type(describe(model).embedding.weight) is nn.Parameter
    for weight in nested_weights(model).values():
        assert weight.group_size == recipe.group_size
        assert weight.overlap == recipe.target_overlap
        assert weight.scale.dtype == recipe.torch_scale_dtype
    assert len(report.tuning_loss) == recipe.tuning_steps
    assert model.config.quantization_config.recipe == recipe.to_dict()
    assert model.config.quantization_config.report == report.to_dict()


def test_a_hadamard_rotation() -> None:
    model = small_models.build("llama-gqa", hidden_size=64)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    recipe = bitnest_w4w8(group_size=32, rotation="hadamard")
    report = quantize_(model, recipe, calibration=calibration(model), progress=False)
    assert distance(logits(model, tokens), expected) < budget(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = small_models.build("llama-gqa", dtype=dtype)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    expected = logits(model, small_models.tokens(model))
    report = quantize_(model, RECIPE, calibration=calibration(model), progress=False)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert distance(logits(model, small_models.tokens(model)), expected) < budget(report)


def test_a_residual_stream_that_cannot_be_rotated_is_noted() -> None:
    model = small_models.build("gemma2", sliding_window=8)
    expected = logits(model, small_models.tokens(model))
    report = quantize_(model, RECIPE, calibration=calibration(model), progress=False)
    assert any("residual stream is not rotated" in note for note in report.notes)
    assert distance(logits(model, small_models.tokens(model)), expected) < budget(report)


def test_a_compiled_model_is_nested_inside() -> None:
    model = small_models.build("llama-gqa")
    compiled = torch.compile(model, backend="eager")
    quantize_(compiled, RECIPE, calibration=calibration(model), progress=False)
    assert nested_weights(model)


def test_calibration_fits_the_inputs_that_it_saw() -> None:
    # Inputs of the first layer that span 12 of its 48 dimensions: compensation can put the error of
    # rounding into the other 36, rounding to nearest cannot.
    tokens = torch.randint(0, 12, (16, 64), generator=torch.Generator().manual_seed(0))
    errors = []
    for given in (tokens, None):
        model = small_models.build("llama-gqa")
        expected = nullcontext() if given is not None else pytest.warns(match=UNCALIBRATED)
        with expected:
            report = quantize_(model, RECIPE, calibration=given, progress=False)
        layer = model.model.layers[0]
        inputs = layer.input_layernorm(model.model.embed_tokens(tokens)).detach()
        weight = layer.self_attn.q_proj.weight
        # The rotated dense weight, which is the same for both, to the refinement's resolution.
        target = inputs @ weight.dequantize("target").T
        errors.append(distance(inputs @ weight.dequantize("draft").T, target))
        assert report.linears[0].name.endswith("q_proj")
    calibrated, nearest = errors
    assert calibrated < 0.5 * nearest


def test_reproducible_by_seed() -> None:
    nested_models.assert_same_model(quantized(), quantized())
    other = quantized(recipe=bitnest_w4w8(group_size=32, seed=1))
    ours = nested_weights(quantized())
    assert all(
        not torch.equal(weight.base, ours[name].base)
        for name, weight in nested_weights(other).items()
    )


def equal_codes(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Share of base codes that two models have in common."""

    def codes(model: PreTrainedModel) -> Tensor:
        weights = nested_weights(model).values()
        return torch.cat(
            [unpack_base(w.base, w.group_size)[:, : w.in_features].flatten() for w in weights]
        )

    return (codes(one) == codes(other)).float().mean().item()


def test_the_batch_size_is_only_float_noise() -> None:
    one = quantized(batch_size=1)
    # Noise in a Hessian flips codes that lie near a tie, and each flip moves others.
    assert equal_codes(one, quantized(batch_size=8)) > 0.99
    # What another calibration changes is more than that.
    other = calibration(small_models.build("llama-gqa"), seed=2)
    assert equal_codes(one, quantized(calibration=other)) < 0.9


def test_calibration_forms_agree() -> None:
    rows = calibration(small_models.build("llama-gqa"))
    forms = [rows, rows.tolist(), list(rows), rows.flatten()]
    models = [quantized(calibration=form, calibration_length=64) for form in forms]
    for model in models[1:]:
        nested_models.assert_same_model(models[0], model)


@pytest.mark.parametrize("tuning_steps", [0, 1])
def test_a_model_in_training_mode_is_calibrated_without_dropout(tuning_steps: int) -> None:
    recipe = bitnest_w4w8(group_size=32, tuning_steps=tuning_steps)
    models = [small_models.build("llama-gqa", attention_dropout=0.5) for _ in range(2)]
    training = models[1].train()
    training.model.layers[0].eval()
    modes = [module.training for module in training.modules()]
    for model in models:
        quantize_(model, recipe, calibration=calibration(model), progress=False)
    assert [module.training for module in training.modules()] == modes
    nested_models.assert_same_model(*models)


@pytest.mark.parametrize(
    ("tuning_steps", "rest"), [(0, "the rest was not used"), (1, "tuning used all")]
)
def test_the_cap_on_hessian_tokens_is_reported(
    tuning_steps: int, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_models.build("llama-gqa")
    recipe = bitnest_w4w8(group_size=32, tuning_steps=tuning_steps)
    monkeypatch.setattr("nestq.quantize.HESSIAN_TOKENS", 4 * 64 + 1)
    rows = calibration(model)
    options = {"calibration_length": 64, "progress": False}
    report = quantize_(model, recipe, calibration=rows, **options)
    assert (report.calibration_tokens, report.hessian_tokens) == (16 * 64, 4 * 64)
    assert len(report.notes) == 1
    assert (
        f"first 256 of 1024 calibration tokens, as more hardly change acceptance; {rest}"
        in (report.notes[0])
    )
    if not tuning_steps:
        fewer = small_models.build("llama-gqa")
        quantize_(fewer, recipe, calibration=rows[:4], **options)
        nested_models.assert_same_model(model, fewer)


def test_calibrated_quantizing_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = quantized()
    assert model.config.quantization_config.recipe["refinement"] == "compensated"


@pytest.mark.parametrize(
    ("family", "rotation"), [("qwen2", "none"), ("gemma2", "none"), ("gemma2", "orthogonal")]
)
def test_a_head_that_nothing_changes_stays_tied(family: str, rotation: str, tmp_path: Path) -> None:
    model = small_models.build(family, tied=True)
    recipe = bitnest_w4w8(group_size=32, rotation=rotation, quantize_head=False)
    quantize_(model, recipe, calibration=calibration(model), progress=False)
    assert describe(model).tied
    assert model.config.tie_word_embeddings
    nestq.save(model, tmp_path / "model")
    loaded = nestq.load(tmp_path / "model")
    assert describe(loaded).tied
    nested_models.assert_same_model(loaded, model)


@pytest.mark.parametrize("rotation", ["none", "orthogonal"])
def test_a_nested_head_is_untied(rotation: str, tmp_path: Path) -> None:
    model = small_models.build("qwen2", tied=True)
    recipe = bitnest_w4w8(group_size=32, rotation=rotation)
    quantize_(model, recipe, calibration=calibration(model), progress=False)
    assert model.config.tie_word_embeddings is False
    nestq.save(model, tmp_path / "model")
    nested_models.assert_same_model(nestq.load(tmp_path / "model"), model)
