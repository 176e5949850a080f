"""``NestedQuantTensor``: what nesting keeps of a weight, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from nested_tensors import make, parts, random, tensors
from torch import Tensor, nn

from nestq.reference import weights as reference
from nestq.tensor import NestedQuantTensor
from nestq.tiled_tensor import TiledQuantTensor

VIEWS = ("draft", "target")
# Relative rounding error of each dtype that a weight may be dequantized to.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


# Nesting.


@given(tensors())
def test_draft_and_target_are_near_the_weight(sample: tuple[Tensor, NestedQuantTensor]) -> None:
    """Half a step of each, and what dividing and dequantizing in float32 rounds.

    A bfloat16 scale may be 2^-8 too small, so the largest weight is at most 7 (1 + 2^-8) of it:
    within half a step of code 7. The refinement reaches 7 / overlap steps of the base.
    """
    weight, nested = sample
    weight = weight.double()
    step = reference.expand_scale(nested.scale.double(), nested.group_size)[:, : weight.shape[1]]
    rounding = 8 * 2.0**-24 * (weight.abs() + 8 * step)
    draft = nested.dequantize("draft", torch.float64)
    target = nested.dequantize("target", torch.float64)
    assert ((weight - draft).abs() <= step / 2 + rounding).all()
    reach = (step / 2 - 7 * step / nested.overlap).clamp(min=0)
    assert ((weight - target).abs() <= (step / 2 / nested.overlap).maximum(reach) + rounding).all()


@given(tensors())
def test_base_and_scale_do_not_know_the_overlap(
    sample: tuple[Tensor, NestedQuantTensor],
) -> None:
    weight, nested = sample
    for overlap in (1, 8, 12, 16):
        other = NestedQuantTensor.from_hp(
            weight, nested.group_size, overlap, scale_dtype=nested.scale.dtype
        )
        assert torch.equal(other.base, nested.base)
        assert torch.equal(other.scale, nested.scale)


@given(tensors(), st.integers(0, 255))
def test_draft_does_not_read_the_refinement(
    sample: tuple[Tensor, NestedQuantTensor], poison: int
) -> None:
    _, nested = sample
    x = random(3, nested.in_features)
    dense, out = nested.dequantize("draft"), nested.linear(x, None, "draft")
    nested.refinement.fill_(poison)
    assert torch.equal(nested.dequantize("draft"), dense)
    assert torch.equal(nested.linear(x, None, "draft"), out)
    nested.refinement = None
    assert torch.equal(nested.dequantize("draft"), dense)
    assert torch.equal(nested.linear(x, None, "draft"), out)


def test_target_reads_the_refinement() -> None:
    nested, x = make(), random(3, 100)
    dense, out = nested.dequantize(), nested.linear(x, None, "target")
    nested.refinement.bitwise_xor_(0x11)
    assert not torch.equal(nested.dequantize(), dense)
    assert not torch.equal(nested.linear(x, None, "target"), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_dtype(dtype: torch.dtype) -> None:
    nested = make().to(dtype)
    for view in VIEWS:
        exact = nested.dequantize(view, torch.float64)
        assert nested.dequantize(view).dtype == dtype
        error = (nested.dequantize(view).double() - exact).abs()
        assert (error <= (ROUNDING[dtype] + 2 * 2.0**-24) * exact.abs()).all()
        assert nested.dequantize(view, torch.float32).dtype == torch.float32


def test_largest_weight_stays_finite() -> None:
    weight = torch.full((2, 32), 2.0**120)
    weight[0] *= -1
    for overlap in (1, 12, 16):
        nested = NestedQuantTensor.from_hp(weight, 32, overlap)
        for view in VIEWS:
            assert torch.allclose(nested.dequantize(view), weight, rtol=2.0**-7)


def test_scale_that_underflows_gives_zeros() -> None:
    nested = NestedQuantTensor.from_hp(torch.full((1, 32), 1e-30), 32, 8, torch.float16)
    assert not nested.scale.any()
    for view in VIEWS:
        assert not nested.dequantize(view).any()


# Refusals.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_weight_that_cannot_be_nested(value: float) -> None:
    weight = random(3, 40)
    weight[1, 7] = value
    with pytest.raises(ValueError, match=r"weight must be finite and at most 2\*\*120"):
        NestedQuantTensor.from_hp(weight)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.zeros(3), {}, "2-D floating-point"),
        (torch.zeros(3, 0), {}, "non-empty"),
        (torch.zeros(3, 4, dtype=torch.int8), {}, "floating-point"),
        (torch.zeros(3, 4), {"group_size": 16}, "group_size must be one of"),
        (torch.zeros(3, 4), {"overlap": 0}, "overlap must be an int from 1 to 16, got 0"),
        (torch.zeros(3, 4), {"overlap": 17}, "overlap must be"),
        (torch.zeros(3, 4), {"overlap": 8.0}, "overlap must be"),
        (torch.full((3, 4), 1e6), {"scale_dtype": torch.float16}, "scale_dtype torch.float16"),
    ],
)
def test_wrong_arguments(weight: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NestedQuantTensor.from_hp(weight, **options)


@pytest.mark.parametrize(
    ("base", "refinement", "message"),
    [
        (8, 0, r"base_codes must be in \[-8, 7\], got \[0, 8\]"),
        (0, -9, r"refinement_codes must be in \[-8, 7\]"),
        (-8, -1, "keep overlap"),
    ],
)
def test_codes_out_of_range(base: int, refinement: int, message: str) -> None:
    codes = torch.zeros(2, 2, 32, dtype=torch.int8)
    codes[:, 1, 5] = torch.tensor([base, refinement])
    with pytest.raises(ValueError, match=message):
        NestedQuantTensor.from_codes(
            *codes,
            torch.ones(2, 1),
            group_size=32,
            overlap=16,
            in_features=32,
            hp_dtype=torch.float32,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            1e-5,
            r"scale must be exact in fixed point, .*in row 1, group 1.*weights\.round_scale gave",
        ),
        (-0.5, "scale must be finite and not negative, found -0.5 to 1.0"),
        (float("nan"), "scale must be finite"),
        (float("inf"), "scale must be finite"),
    ],
)
def test_scales_that_layers_cannot_hold(value: float, message: str, dtype: torch.dtype) -> None:
    """Weights, their place on a GPU and linear layers all have the same scales."""
    codes = torch.ones(2, 64, dtype=torch.int8)
    options: Any = {"group_size": 32, "overlap": 8, "in_features": 64, "hp_dtype": torch.float32}
    scale = torch.tensor([[1.0, 0.5], [1.0, value]]).to(dtype)
    with pytest.raises(ValueError, match=message):
        NestedQuantTensor.from_codes(codes, None, scale, **options)
    exact = reference.round_scale(scale.nan_to_num(0, 0).clamp(min=0), dtype)
    nested = NestedQuantTensor.from_codes(codes, None, exact, **options)
    assert torch.equal(nested.scale, exact)
    unrounded = NestedQuantTensor(nested.base, scale, 32, 8, 64, torch.float32)
    with pytest.raises(ValueError, match=message):
        TiledQuantTensor.from_canonical(unrounded)


@pytest.mark.parametrize(
    ("part", "wrong", "message"),
    [
        ("base", torch.zeros(24, 63, dtype=torch.uint8), r"base must be uint8 of shape \(24, 64\)"),
        ("base", torch.zeros(24, 64, dtype=torch.int8), "base must be uint8"),
        ("refinement", torch.zeros(23, 64, dtype=torch.uint8), "refinement must be uint8"),
        ("scale", torch.zeros(24, 3), r"scale must be floating point of shape \(24, 4\)"),
        ("scale", torch.zeros(24, 4, dtype=torch.int8), "scale must be floating point"),
        ("scale", torch.zeros(24, 4, device="meta"), "on one device, .* scale on meta"),
        ("refinement", make().refinement.to("meta"), "on one device, .* refinement on meta"),
    ],
)
def test_planes_that_do_not_fit(part: str, wrong: Tensor, message: str) -> None:
    planes = {**parts(make()), part: wrong}
    with pytest.raises(ValueError, match=message):
        NestedQuantTensor(
            planes["base"], planes["scale"], 32, 8, 100, torch.float32, planes["refinement"]
        )


def test_unknown_view_and_missing_refinement() -> None:
    nested = make()
    with pytest.raises(ValueError, match="view must be 'draft' or 'target', got 'both'"):
        nested.dequantize("both")
    nested.refinement = None
    with pytest.raises(RuntimeError, match="only the base plane is loaded"):
        nested.dequantize()
    with pytest.raises(RuntimeError, match="only the base plane is loaded"):
        F.linear(random(1, 100), nested)


def test_not_trainable() -> None:
    nested = make()
    with pytest.raises(ValueError, match="requires_grad must be False"):
        nn.Parameter(nested)
    with pytest.raises(ValueError, match="requires_grad must be False"):
        nested.requires_grad_()
    parameter = nn.Parameter(nested, requires_grad=False)
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad
    assert not F.linear(random(2, 100), parameter).requires_grad
