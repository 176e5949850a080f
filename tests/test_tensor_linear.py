"""``F.linear`` on a ``NestedQuantTensor``: exact integers, row by row, by the view."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from nested_tensors import random
from torch import Tensor

from nestq.reference import weights as reference
from nestq.reference.linear import quantize_activation
from nestq.tensor import NestedQuantTensor
from nestq.tiled_tensor import TiledQuantTensor
from nestq.view import nest_view

VIEWS = ("draft", "target")
# Relative rounding error of float32, and of each dtype that a layer may return.
U = 2.0**-24
ROUNDING = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def exact_linear(
    x: Tensor, weight: NestedQuantTensor, bias: Tensor | None, view: str
) -> tuple[Tensor, Tensor]:
    """The result in float64 from the same INT8 codes, and the sum of its terms' magnitudes."""
    codes, activation_scale = quantize_activation(x)
    dense = weight.dequantize(view, torch.float64)
    activation = codes.double() * activation_scale.double()
    out, magnitude = activation @ dense.T, activation.abs() @ dense.abs().T
    if bias is not None:
        out, magnitude = out + bias.double(), magnitude + bias.double().abs()
    return out, magnitude


@given(
    rows=st.integers(0, 4),
    out_features=st.integers(1, 6),
    in_features=st.one_of(st.sampled_from([1, 31, 576, 1000]), st.integers(1, 300)),
    group_size=st.sampled_from([32, 64, 128]),
    overlap=st.integers(1, 16),
    dtype=st.sampled_from(list(ROUNDING)),
    has_bias=st.booleans(),
    view=st.sampled_from(VIEWS),
    magnitude=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_linear_within_its_error_budget(
    rows: int,
    out_features: int,
    in_features: int,
    group_size: int,
    overlap: int,
    dtype: torch.dtype,
    has_bias: bool,
    view: str,
    magnitude: float,
    seed: int,
) -> None:
    """Integers are exact inside a group. float32 then rounds, per term: its product with the
    group's scale, at most G additions, the scale of the activation over the overlap, the product
    with it, and the bias: G + 4 roundings of at most U. The result is rounded to its dtype once
    (to the smallest number of float16, 2^-24, if it is subnormal).
    """
    weight = NestedQuantTensor.from_hp(random(out_features, in_features, seed=seed), group_size)
    weight.overlap = overlap
    x = (random(rows, in_features, seed=seed + 1) * magnitude).to(dtype)
    bias = random(out_features, seed=seed + 2).to(dtype) if has_bias else None
    expected, magnitudes = exact_linear(x, weight, bias, view)
    with nest_view(view):
        out = F.linear(x, weight, bias)
    assert out.dtype == dtype
    assert out.shape == (rows, out_features)
    groups = -(-in_features // group_size)
    budget = (groups + 4) * U * magnitudes * (1 + 2.0**-10)
    budget += ROUNDING[dtype] * (expected.abs() + budget) + 2.0**-25
    assert ((out.double() - expected).abs() <= budget).all()


@pytest.mark.parametrize("shape", [(100,), (1, 100), (0, 100), (3, 2, 100), (0, 3, 100)])
@pytest.mark.parametrize("view", VIEWS)
def test_any_number_of_dimensions(shape: tuple[int, ...], view: str) -> None:
    weight, bias = NestedQuantTensor.from_hp(random(7, 100), 32), random(7)
    dense = random(7, 100)
    x = random(*shape)
    with nest_view(view):
        nested = F.linear(x, weight, bias)
        plain = F.linear(x, dense, bias)
        rows = F.linear(x.reshape(-1, 100), weight, bias)
    assert nested.shape == plain.shape == (*shape[:-1], 7)
    assert torch.equal(nested, rows.view(nested.shape))
    torch.testing.assert_close(plain, F.linear(x, dense, bias))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_row_has_the_same_bits_in_any_company(
    view: str, nested: bool, dtype: torch.dtype
) -> None:
    weight: Tensor = random(48, 576).to(dtype)
    if nested:
        weight = NestedQuantTensor.from_hp(weight, 64)
    x, bias = random(33, 576).to(dtype), random(48).to(dtype)
    with nest_view(view):
        together = F.linear(x, weight, bias)
        for rows in (1, 2, 5, 32):
            alone = torch.cat([F.linear(part, weight, bias) for part in x.split(rows)])
            assert torch.equal(alone, together)
        assert torch.equal(F.linear(x.flip(0), weight, bias), together.flip(0))
        assert torch.equal(F.linear(x[7], weight, bias), together[7])
        strided = torch.stack((x, x), dim=1)[:, 0]
        assert torch.equal(F.linear(strided, weight, bias), together)


def test_rows_of_weights_are_independent() -> None:
    """Slices of a fused weight give the slices of its result."""
    weight, x = NestedQuantTensor.from_hp(random(48, 576), 64), random(3, 576)
    for view in VIEWS:
        with nest_view(view):
            assert torch.equal(F.linear(x, weight[5:20]), F.linear(x, weight)[:, 5:20])


def test_view_decides_and_is_target_outside() -> None:
    weight, x = NestedQuantTensor.from_hp(random(7, 100), 32), random(2, 100)
    outputs = {}
    for view in VIEWS:
        with nest_view(view):
            outputs[view] = F.linear(x, weight)
        assert torch.equal(outputs[view], weight.linear(x, None, view))
    assert not torch.equal(outputs["draft"], outputs["target"])
    assert torch.equal(F.linear(x, weight), outputs["target"])
    with torch.inference_mode():
        assert torch.equal(F.linear(x, weight), outputs["target"])


def test_draft_runs_without_a_refinement() -> None:
    weight, x = NestedQuantTensor.from_hp(random(7, 100), 32), random(2, 100)
    with nest_view("draft"):
        out = F.linear(x, weight)
        weight.refinement.fill_(255)
        assert torch.equal(F.linear(x, weight), out)
        weight.refinement = None
        assert torch.equal(F.linear(x, weight), out)


def test_activation_that_is_not_finite_reaches_the_result() -> None:
    """An overflow upstream must show, in its own row only."""
    weight, x = NestedQuantTensor.from_hp(random(7, 100), 32), random(3, 100)
    expected = F.linear(x, weight)
    for value in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[1, 5] = value
        out = F.linear(spoilt, weight)
        assert out[1].isnan().all()
        assert torch.equal(out[::2], expected[::2])


@pytest.mark.parametrize("in_features", [99, 101, 128])
def test_wrong_number_of_features(in_features: int) -> None:
    """Padding to whole groups must not hide it."""
    weight = NestedQuantTensor.from_hp(random(7, 100), 32)
    with pytest.raises(ValueError, match=r"input must have 100 features, got shape \(2, "):
        F.linear(random(2, in_features), weight)


def test_composed_code_at_the_ends_of_int8() -> None:
    """-128 and 119 with overlap 16: nothing wraps."""
    base = torch.tensor([[-8] * 32, [7] * 32], dtype=torch.int8)
    refinement = torch.tensor([[0] * 32, [7] * 32], dtype=torch.int8)
    weight = NestedQuantTensor.from_codes(
        base,
        refinement,
        torch.ones(2, 1),
        group_size=32,
        overlap=16,
        in_features=32,
        hp_dtype=torch.float32,
    )
    assert torch.equal(F.linear(torch.ones(1, 32), weight), torch.tensor([[-256.0, 238.0]]))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(100,), (3, 100), (0, 100), (2, 3, 100)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(view: str, shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype) -> None:
    weight = NestedQuantTensor.from_hp(random(7, 100), 32)
    refinement = weight.refinement if view == "target" else None
    x, bias = random(*shape).to(dtype), random(7).to(dtype) if has_bias else None
    tiled = TiledQuantTensor.from_canonical(weight)
    tiled_refinement = tiled.refinement if view == "target" else None
    for planes in (
        (weight.base, refinement, weight.scale, None),
        (tiled.base, tiled_refinement, tiled.scale, tiled.unit),
    ):
        torch.library.opcheck(torch.ops.nestq.dual_plane_linear.default, (x, *planes, bias, 32, 8))
    torch.library.opcheck(torch.ops.nestq.linear_16.default, (x, random(7, 100).to(dtype), bias))


def test_padding_codes_are_zero() -> None:
    """So that what activations are padded with cannot matter."""
    weight = NestedQuantTensor.from_hp(random(7, 100), 64)
    assert not reference.unpack_base(weight.base, 64)[:, 100:].any()
    assert not reference.unpack_refinement(weight.refinement, 64)[:, 100:].any()
