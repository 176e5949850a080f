"""``quantize_`` with recipes of one 4-bit weight: exact views, reports, refusals, decoding."""

import copy
from typing import Any

import pytest
import small_models
import torch
from four_bit_models import RECIPES, four_bit_weights, logits, quantized
from four_bit_tensors import (
    activations_by_hand,
    rotation_by_hand,
    weight_by_hand,
)
from quantized_models import calibration
from torch import Tensor, nn

import nestq
from nestq import FourBitTensor, nest_view, qspec_w4, quantize_, quantspec_w4w16, w4a8, w4a16
from nestq.architectures import UnsupportedArchitectureError, describe
from nestq.kv_policy import default_policy
from nestq.quantize import UNCALIBRATED_FOUR_BIT

VIEWS = ("draft", "target")


class LayerByHand(nn.Module):
    """A view of a quantized linear: dequantized by hand, its activations rounded by hand."""

    def __init__(self, linear: nn.Linear, bits: int | None) -> None:
        super().__init__()
        weight: Any = linear.weight
        self.bits = bits
        self.rotation = rotation_by_hand(weight.in_features, weight.input_rotation)
        if bits is None:
            self.rotation = torch.eye(weight.in_features, dtype=torch.float64)
        self.dense = weight.dense.double() if bits is None else weight_by_hand(weight)
        self.bias = None if linear.bias is None else linear.bias.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.rotation
        if self.bits in (4, 8):
            codes, scale = activations_by_hand(x.reshape(-1, x.shape[-1]), self.bits)
            x = (codes.double() * scale.double()).view(x.shape)
        return nn.functional.linear(x, self.dense, self.bias)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["quantspec", "qspec", "w4a8", "w4a16"])
def test_a_model_is_its_linears_by_hand(name: str, view: str) -> None:
    """The whole model in float64. Integer layers round their results to float32 (2^-24 a layer, of
    15), and a rotation rounds a code otherwise only at a tie, which these numbers do not have.
    """
    model = small_models.exact_(quantized(name, "qwen2"))
    by_hand = copy.deepcopy(model)
    for path, weight in four_bit_weights(by_hand).items():
        bits = weight.draft_bits if view == "draft" else weight.target_bits
        linear = by_hand.get_submodule(path)
        by_hand.set_submodule(path, LayerByHand(linear, bits))
    out, expected = logits(model, view), logits(by_hand, view)
    tolerance = 1e-5 if _bits(model, view) & {4, 8} else 1e-9
    assert torch.allclose(out, expected, rtol=tolerance, atol=tolerance)


def _bits(model: Any, view: str) -> set[int | None]:
    weights = four_bit_weights(model).values()
    return {w.draft_bits if view == "draft" else w.target_bits for w in weights}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_the_target_of_quantspec_is_the_model_as_it_was(family: str, tied: bool) -> None:
    original = small_models.build(family, tied=tied)
    model = quantized("quantspec", family, tied)
    assert torch.equal(logits(model, "target"), logits(original, "target"))
    assert not torch.equal(logits(model, "draft"), logits(original, "draft"))
    tokens = small_models.tokens(model)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("family", [*small_models.FAMILIES, "gemma2"])
@pytest.mark.parametrize("name", list(RECIPES))
def test_every_family_with_calibration(name: str, family: str) -> None:
    model = small_models.build(family)
    original = copy.deepcopy(model)
    recipe = RECIPES[name](group_size=32)
    report = quantize_(model, recipe, calibration=calibration(model), progress=False)
    architecture = describe(model)
    names = [*dict(architecture.named_linears())] + ["lm_head"] * recipe.quantize_head
    assert [entry.name for entry in report.linears] == names
    assert set(four_bit_weights(model)) == set(names)
    for entry in report.linears:
        assert 0 < entry.draft_error < 0.12
        exact = recipe.target_bits is None
        assert entry.target_error == (0 if exact else entry.draft_error)
        assert entry.damping == recipe.damping
    rotated = {n: w.input_rotation for n, w in four_bit_weights(model).items() if w.input_rotation}
    downs = [n for n in names if n.endswith("down_proj")] if recipe.rotate_down else []
    assert rotated == dict.fromkeys(downs, 4)  # 100 features
    assert str(default_policy(model)) == recipe.kv
    expected = logits(original, "target")
    distance = (logits(model, "target") - expected).norm() / expected.norm()
    assert distance < 0.3


def test_calibration_lowers_errors() -> None:
    """Of outputs on what the layers really see: the rotated inputs of the MLP's output, too."""
    errors = []
    for calibrated in (False, True):
        model = small_models.build("llama-gqa", "odd", num_hidden_layers=1)
        rows = calibration(model)
        expected = logits(model, "target", rows[:4])
        if calibrated:
            quantize_(model, w4a16(rotate_down=True), calibration=rows, progress=False)
        else:
            with pytest.warns(UserWarning, match="rounded to nearest"):
                quantize_(model, w4a16(rotate_down=True), progress=False)
        errors.append((logits(model, "target", rows[:4]) - expected).norm().item())
    assert errors[1] < errors[0]


def test_without_calibration_it_warns() -> None:
    model = small_models.build("llama-gqa")
    with pytest.warns(UserWarning, match="no calibration was given: weights are rounded"):
        report = quantize_(model, w4a8(), progress=False)
    assert UNCALIBRATED_FOUR_BIT in report.notes


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["quantspec", "qspec", "w4a8", "w4a16"])
def test_a_row_of_a_model_has_the_same_bits_in_any_company(name: str, view: str) -> None:
    model = quantized(name)
    tokens = small_models.tokens(model, batch=5, length=9)
    together = logits(model, view, tokens)
    for rows in (1, 2):
        alone = torch.cat([logits(model, view, part) for part in tokens.split(rows)])
        assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["quantspec", "quantspec-weights", "qspec"])
def test_drafting_gives_the_tokens_of_the_target(name: str, dtype: torch.dtype) -> None:
    model = quantized(name, dtype=dtype)
    tokens = small_models.tokens(model, 3, 8)
    expected = nestq.speculative_generate(model, tokens, gamma=0, max_new_tokens=16)
    for gamma in (1, 2, 3, 4):
        found = nestq.speculative_generate(model, tokens, gamma=gamma, max_new_tokens=16)
        assert torch.equal(found, expected)


def test_drafting_in_float64_gives_the_tokens_of_the_target() -> None:
    for name in ("quantspec", "qspec"):
        model = small_models.exact_(quantized(name)).eval()
        tokens = small_models.tokens(model, 2, 8)
        sequences = [
            nestq.speculative_generate(model, tokens, gamma=gamma, max_new_tokens=16, kv="16/16")
            for gamma in (0, 3)
        ]
        assert torch.equal(*sequences)


@pytest.mark.parametrize("name", ["w4a8", "w4a16"])
def test_a_draft_that_is_its_target_is_refused(name: str) -> None:
    model = quantized(name)
    tokens = small_models.tokens(model, 1, 8)
    nestq.speculative_generate(model, tokens, gamma=0, max_new_tokens=2)
    with pytest.raises(ValueError, match="its draft would be the target itself"):
        nestq.speculative_generate(model, tokens, gamma=2, max_new_tokens=2)


def test_a_dense_weight_that_is_missing_is_refused() -> None:
    model = quantized("quantspec")
    model.lm_head.weight.dense = None
    with pytest.raises(ValueError, match=r"lm_head\.weight has the base plane alone"):
        nestq.speculative_generate(model, small_models.tokens(model, 1, 8), gamma=2)


# Only the cache.


def test_without_weights_only_the_policy_is_stored() -> None:
    model = small_models.build("llama-gqa")
    before = copy.deepcopy(model)
    report = quantize_(model, quantspec_w4w16(weights=False), progress=False)
    assert report.linears == ()
    assert not four_bit_weights(model)
    assert str(default_policy(model)) == "quantspec"
    assert all(map(torch.equal, model.parameters(), before.parameters()))


@pytest.mark.parametrize("argument", [{"calibration": [[1, 2, 3]]}, {"batch_size": 2}])
def test_without_weights_nothing_else_applies(argument: dict[str, Any]) -> None:
    model = small_models.build("llama-gqa")
    name = next(iter(argument))
    with pytest.raises(ValueError, match=rf"{name} does not apply to quantspec_w4w16\(weights=F"):
        quantize_(model, quantspec_w4w16(weights=False), **argument)


# What is refused.


def test_quantizing_twice() -> None:
    model = quantized("w4a8")
    with pytest.raises(ValueError, match="is quantized already"):
        quantize_(model, w4a16(rotation="none"), progress=False)


def test_rotating_an_odd_number_of_features() -> None:
    model = small_models.build("llama-gqa", intermediate_size=99)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"rotate_down must be False: .*down_proj has 99 input"):
        quantize_(model, qspec_w4(), progress=False)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_rotating_a_model_of_unknown_structure() -> None:
    model = small_models.build("llama-gqa")
    model.config.model_type = "unheard-of"
    with pytest.raises(UnsupportedArchitectureError):
        quantize_(model, qspec_w4(), progress=False)
    with pytest.raises(ValueError, match="rotate_down must be False for a model whose structure"):
        quantize_(model, qspec_w4(rotation="none"), progress=False)
    with pytest.warns(UserWarning, match="rounded to nearest"):
        quantize_(model, quantspec_w4w16(group_size=32), progress=False)
    assert len(four_bit_weights(model)) == 15


@torch.no_grad()
def test_compiled_with_both_views() -> None:
    torch.compiler.reset()
    model = quantized("qspec")
    tokens = small_models.tokens(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for view in ("draft", "target", "draft"):
        with nest_view(view):
            assert torch.equal(compiled(tokens).logits, model(tokens).logits)
    assert isinstance(model.model.layers[0].mlp.down_proj.weight, FourBitTensor)
