from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nestq.architectures import describe
from nestq.rotation import ROWS_AT_A_TIME, Rotation, rotate_, untie_

BOTH_BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


def draw(model: nn.Module, seed: int = 0, **options: object) -> Rotation:
    return Rotation.random(describe(model), seed, **options)  # type: ignore[arg-type]


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(small_models.tokens(model)).logits


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Largest over all positions."""
    return ((result - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every weight, under every name it has."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().clone() for name, parameter in named}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in weights(model).items() if not torch.equal(value, before[name])}


def last_names(names: set[str]) -> set[str]:
    """`layers.1.self_attn.v_proj.bias` -> `v_proj.bias`."""
    return {".".join(name.split(".")[-2:]) for name in names}


@pytest.mark.parametrize("size", ["small", "odd"])
@pytest.mark.parametrize("kind", ["orthogonal", "hadamard"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_logits_stay(family: str, tied: bool, kind: str, size: str) -> None:
    model = small_models.exact_(small_models.build(family, size, tied=tied))
    expected = logits(model)
    before = weights(model)

    rotate_(model, draw(model, kind=kind))

    assert relative_error(logits(model), expected) <= 1e-9
    untouched = {"q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight"}
    assert last_names(changed(before, model)) == last_names(set(before)) - untouched
    assert not describe(model).tied


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_r1_alone_leaves_logits_and_values(family: str) -> None:
    model = small_models.exact_(small_models.build(family))
    expected = logits(model)
    before = weights(model)

    rotate_(model, draw(model, r2=False))

    assert relative_error(logits(model), expected) <= 1e-9
    assert "v_proj.bias" not in last_names(changed(before, model))


# Gemma's softmax in float32 gives the same bits for the same input only: in its first layer.
@pytest.mark.parametrize("family", [*small_models.FAMILIES, "gemma2"])
def test_r2_alone_changes_values_and_their_reader_only(family: str) -> None:
    model = small_models.exact_(small_models.build(family, tied=True, num_hidden_layers=1))
    expected = logits(model)
    before = weights(model)
    architecture = describe(model)
    value = f"model.layers.0.{architecture.value_linear}"
    rows = slice(0, architecture.value_rows.start)

    rotate_(model, draw(model, r1=False))

    assert relative_error(logits(model), expected) <= 1e-9
    names = {f"{value}.weight", "model.layers.0.self_attn.o_proj.weight"}
    if f"{value}.bias" in before:
        names.add(f"{value}.bias")
    assert changed(before, model) == names
    weight = f"{value}.weight"
    assert torch.equal(model.get_parameter(weight)[rows], before[weight][rows])
    assert describe(model).tied


def test_all_biases_are_rotated_or_rightly_left() -> None:
    model = small_models.exact_(small_models.build("llama-gqa", **BOTH_BIASES))
    expected = logits(model)
    before = weights(model)

    rotate_(model, draw(model))

    assert relative_error(logits(model), expected) <= 1e-9
    biases = {name for name in last_names(changed(before, model)) if name.endswith("bias")}
    assert biases == {"v_proj.bias", "o_proj.bias", "down_proj.bias"}


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_norm_weights_become_one(family: str) -> None:
    model = small_models.build(family)

    rotate_(model, draw(model))

    folded = [
        parameter for name, parameter in model.named_parameters() if name.endswith("norm.weight")
    ]
    ones = [p for p in folded if torch.equal(p, torch.ones_like(p))]
    assert len(ones) == 5  # two in each layer and the final one; q_norm and k_norm keep theirs


def test_hidden_states_between_layers_are_rotated_by_r1() -> None:
    model = small_models.exact_(small_models.build("qwen2"))
    ids = small_models.tokens(model)
    rotation = draw(model)
    assert rotation.r1 is not None
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        rotate_(model, rotation)
        rotated = model(ids, output_hidden_states=True).hidden_states

    for plain, turned in zip(expected[:-1], rotated[:-1], strict=True):
        assert relative_error(turned, plain @ rotation.r1) <= 1e-9


def test_cached_values_are_rotated_by_r2_and_keys_are_not() -> None:
    model = small_models.exact_(small_models.build("qwen2"))
    ids = small_models.tokens(model)
    rotation = draw(model)
    assert rotation.r2 is not None
    with torch.no_grad():
        expected = model(ids).past_key_values
        rotate_(model, rotation)
        rotated = model(ids).past_key_values

    for index, r2 in enumerate(rotation.r2):
        plain, turned = expected.layers[index], rotated.layers[index]
        assert relative_error(turned.values, plain.values @ r2) <= 1e-9
        assert relative_error(turned.keys, plain.keys) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_cast_once(dtype: torch.dtype) -> None:
    model = small_models.build("qwen2", dtype=dtype)
    wide = small_models.build("qwen2", dtype=dtype).double()
    rotation = draw(model)

    rotate_(model, rotation)
    rotate_(wide, rotation)

    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not changed(weights(wide.to(dtype)), model)  # type: ignore[arg-type]


def test_a_vocabulary_larger_than_one_chunk() -> None:
    model = small_models.exact_(
        small_models.build("llama-gqa", vocab_size=2 * ROWS_AT_A_TIME + 3, num_hidden_layers=1)
    )
    architecture = describe(model)
    embedding, head = architecture.embedding.weight.clone(), architecture.head.weight.clone()
    norm = model.model.norm.weight.clone()
    rotation = draw(model)
    assert rotation.r1 is not None

    rotate_(model, rotation)

    torch.testing.assert_close(architecture.embedding.weight, embedding @ rotation.r1)
    torch.testing.assert_close(architecture.head.weight, head * norm @ rotation.r1)


def test_weights_stay_the_same_parameters() -> None:
    model = small_models.build("phi3")
    before = dict(model.named_parameters())

    rotate_(model, draw(model))

    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(parameter.requires_grad for parameter in after.values())


def test_takes_a_compiled_model() -> None:
    model, plain = small_models.build("llama-gqa", tied=True), small_models.build("llama-gqa")
    plain.load_state_dict(model.state_dict())

    rotate_(torch.compile(model), draw(model))  # type: ignore[arg-type]
    rotate_(plain, draw(plain))

    assert not changed(weights(plain), model)


@pytest.mark.parametrize("family", [*small_models.FAMILIES, "gemma2"])
def test_untied_weights_stay_untied(family: str, tmp_path: Path) -> None:
    model = small_models.build(family, tied=True)
    before = weights(model)

    untie_(model)

    assert not changed(before, model)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.lm_head.weight.requires_grad
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    head = model.lm_head.weight.clone()
    model.tie_weights()
    model.tie_weights(recompute_mapping=False)
    assert torch.equal(model.lm_head.weight, head)

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not changed(weights(model), loaded)
    assert not loaded.config.tie_word_embeddings


def test_untying_an_untied_model_changes_no_weight() -> None:
    model = small_models.build("llama-gqa")
    before = dict(model.named_parameters())

    untie_(model)

    assert all(model.get_parameter(name) is value for name, value in before.items())


def test_rotated_model_survives_saving(tmp_path: Path) -> None:
    model = small_models.build("qwen2", tied=True)
    rotate_(model, draw(model))

    model.save_pretrained(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not changed(weights(model), loaded)
    assert torch.equal(logits(loaded), logits(model))
