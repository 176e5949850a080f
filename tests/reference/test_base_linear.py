"""The linear layer on a base plane: exact integers for 4 bits, row by row for 16."""

from typing import Any

import pytest
import torch
from four_bit_tensors import activations_by_hand, codes_by_hand
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.reference.linear import base_linear, quantize_activation
from nestq.reference.weights import fixed_point_scale, round_scale

# Relative rounding error of each dtype that a layer may return.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def plane(rows: int, columns: int, group_size: int) -> tuple[Tensor, Tensor]:
    groups = -(-columns // group_size)
    base = torch.randint(0, 256, (rows, groups * group_size // 2), dtype=torch.uint8)
    return base, round_scale(torch.rand(rows, groups) + 0.05, torch.bfloat16)


def dense(base: Tensor, scale: Tensor, group_size: int, columns: int) -> Tensor:
    expanded = scale.double().repeat_interleave(group_size, dim=1)
    return (codes_by_hand(base, group_size) * expanded)[:, :columns]


@given(
    tokens=st.integers(0, 5),
    rows=st.integers(1, 9),
    columns=st.one_of(st.sampled_from([1, 64, 576, 1000]), st.integers(1, 300)),
    group_size=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(list(ROUNDING)),
    seed=st.integers(0, 1000),
)
def test_16_bits_within_rounding(
    tokens: int, rows: int, columns: int, group_size: int, dtype: torch.dtype, seed: int
) -> None:
    """Weights are exact. A float32 sum of K products is off by at most K roundings of the sum of
    magnitudes, the bias adds one, and the result is rounded to its dtype once.
    """
    torch.manual_seed(seed)
    base, scale = plane(rows, columns, group_size)
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    out = base_linear(x, base, scale, bias, group_size, 16)
    weight = dense(base, scale, group_size, columns)
    expected = x.double() @ weight.T + bias.double()
    magnitude = x.double().abs() @ weight.abs().T + bias.double().abs()
    budget = (columns + 1) * 2.0**-24 * magnitude * (1 + 2.0**-10)
    budget = budget + ROUNDING[dtype] * (expected.abs() + budget) + 2.0**-25
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= budget).all()


def test_float64_activations_are_multiplied_in_float64() -> None:
    torch.manual_seed(0)
    base, scale = plane(7, 100, 32)
    x = torch.randn(3, 100, dtype=torch.float64)
    out = base_linear(x, base, scale, None, 32, 16)
    torch.testing.assert_close(out, x @ dense(base, scale, 32, 100).T, rtol=1e-13, atol=1e-13)


def test_one_column_at_a_time_is_the_weight() -> None:
    base, scale = plane(40, 128, 64)
    out = base_linear(torch.eye(128), base, scale, None, 64, 16)
    assert torch.equal(out.double(), dense(base, scale, 64, 128).T)


@pytest.mark.parametrize("columns", [64, 100, 1000])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_4_bits_are_exact_integers(tokens: int, group_size: int, columns: int) -> None:
    """Through the operator: C++ for few tokens, the reference for many."""
    torch.manual_seed(columns)
    base, scale = plane(17, columns, group_size)
    x, bias = torch.randn(tokens, columns).bfloat16(), torch.randn(17)
    x[0] = 0
    codes, step = activations_by_hand(x[1:], 4)
    codes = torch.cat((torch.zeros(1, columns, dtype=torch.int64), codes))
    step = torch.cat((torch.zeros(1, 1), step))
    weight = codes_by_hand(base, group_size)[:, :columns]
    scale_codes, unit = fixed_point_scale(scale)
    expanded = scale_codes.long().repeat_interleave(group_size, dim=1)[:, :columns]
    sums = codes @ (weight * expanded).T
    expected = (sums.float() * (step * unit) + bias).bfloat16()
    for compute in (base_linear, _through_operator):
        assert torch.equal(compute(x, base, scale, bias, group_size, 4), expected)


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.float64])
def test_16_bits_are_the_same_with_weights_made_in_cpp(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    base, scale = plane(40, 1000, 64)
    for tokens in (1, 5, 70):
        x, bias = torch.randn(tokens, 1000).to(dtype), torch.randn(40).to(dtype)
        expected = base_linear(x, base, scale, bias, 64, 16)
        assert torch.equal(_through_operator(x, base, scale, bias, 64, 16), expected)


def _through_operator(x: Tensor, base: Tensor, scale: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    return torch.ops.nestq.base_linear(x, base, scale, None, bias, *rest)


def test_4_bit_codes_clip_a_tenth() -> None:
    x = torch.tensor([[7.0, 6.3, 5.0, -7.0, 0.44, 0.46, 0.0]])
    codes, scale = quantize_activation(x, 4)
    assert scale.item() == pytest.approx(0.9, rel=2**-22)
    assert codes.tolist() == [[7, 7, 6, -7, 0, 1, 0]]


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_row_has_the_same_bits_in_any_company(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    base, scale = plane(48, 576, 64)
    x, bias = torch.randn(33, 576).to(dtype), torch.randn(48).to(dtype)
    arguments: Any = (base, scale, None, bias, 64, bits)
    together = torch.ops.nestq.base_linear(x, *arguments)
    for rows in (1, 2, 5, 32):
        alone = [torch.ops.nestq.base_linear(part, *arguments) for part in x.split(rows)]
        assert torch.equal(torch.cat(alone), together)
    assert torch.equal(torch.ops.nestq.base_linear(x.flip(0), *arguments), together.flip(0))
    strided = torch.stack((x, x), dim=1)[:, 0]
    assert torch.equal(torch.ops.nestq.base_linear(strided, *arguments), together)


@pytest.mark.parametrize("bits", [0, 8, 15])
def test_other_bits_are_refused(bits: int) -> None:
    base, scale = plane(3, 64, 64)
    with pytest.raises(ValueError, match=f"activation_bits must be 4 or 16, got {bits}"):
        base_linear(torch.randn(1, 64), base, scale, None, 64, bits)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("shape", [(100,), (0, 100), (2, 3, 100)])
def test_opcheck(bits: int, shape: tuple[int, ...]) -> None:
    base, scale = plane(7, 100, 32)
    for bias in (None, torch.randn(7)):
        arguments = (torch.randn(shape), base, scale, None, bias, 32, bits)
        torch.library.opcheck(torch.ops.nestq.base_linear.default, arguments)
