"""The exact linear: scales in fixed point, sums without an order."""

from functools import reduce

import torch
from hypothesis import given
from hypothesis import strategies as st

from nestq.reference.linear import integer_matmul, nested_linear
from nestq.reference.weights import (
    absmax_scale,
    fixed_point_scale,
    pack_base,
    pack_refinement,
    round_scale,
    round_to_base,
)


def planes(rows: int, columns: int, group_size: int, overlap: int = 8) -> tuple[torch.Tensor, ...]:
    base = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    refinement = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    scale = (torch.rand(rows, columns // group_size) + 0.1).bfloat16()
    return pack_base(base, group_size), pack_refinement(refinement, group_size), scale


def test_bfloat16_scales_are_exact_within_seven_bits_of_the_largest() -> None:
    mantissa = torch.arange(128, 256, dtype=torch.float32)
    for exponent in (-100, -20, 0, 90):
        scale = torch.stack([mantissa * 2.0 ** (exponent + e) for e in range(8)], dim=1)
        scale[:, 7] = 255 * 2.0 ** (exponent + 7)
        codes, unit = fixed_point_scale(scale.bfloat16())
        assert torch.equal(codes.double() * unit.double()[:, None], scale.double())
        assert codes.min() >= 128  # as int16: nothing wrapped


@given(st.integers(-160, 115), st.integers(0, 1000))
def test_no_scale_is_off_by_more_than_the_last_bit_of_the_largest(exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(4, 6, generator=generator, dtype=torch.float64) * 30 - 30
    scale = (2.0 ** (spread + exponent)).float()
    codes, unit = fixed_point_scale(scale)

    assert codes.min() >= 0
    largest = scale.double().amax(-1, keepdim=True)
    error = (codes.double() * unit.double()[:, None] - scale.double()).abs()
    # The unit of a tiny row is the smallest normal number, not a fraction of the row.
    assert (error <= (largest * 2.0**-15).clamp(min=2.0**-126)).all()


@given(st.integers(0, 1000), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_a_rounded_scale_is_exact_in_fixed_point(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** (torch.rand(4, 6, generator=generator) * 24 - 20)
    stored = round_scale(scale, dtype)
    codes, unit = fixed_point_scale(stored)
    assert stored.dtype == dtype
    assert torch.equal(codes * unit[:, None], stored.float())
    assert torch.equal(round_scale(stored, dtype), stored)


def test_a_scale_that_is_not_finite_shows_in_its_row_alone() -> None:
    base, refinement, scale = planes(3, 128, 64)
    scale[0, 1], scale[1, 0] = torch.nan, torch.inf
    out = nested_linear(torch.ones(1, 128), base, refinement, scale, None, 64, 8)
    assert torch.isnan(out[0]).tolist() == [True, True, False]


def test_rows_of_zero_scales_give_zeros() -> None:
    codes, unit = fixed_point_scale(torch.zeros(2, 3))
    assert codes.count_nonzero() == 0
    assert torch.isfinite(unit).all()
    assert (unit > 0).all()


def test_the_sum_over_groups_has_no_order() -> None:
    """Permuting groups of 7168 columns changes no bit; a float32 sum in two orders differs."""
    torch.manual_seed(0)
    group_size, columns = 64, 7168
    base, refinement, scale = planes(32, columns, group_size)
    x = torch.randn(5, columns)
    order = torch.randperm(columns // group_size)

    def permuted(plane: torch.Tensor, width: int) -> torch.Tensor:
        return plane.unflatten(1, (-1, width))[:, order].flatten(1)

    args = (None, group_size, 8)
    expected = nested_linear(x, base, refinement, scale, *args)
    shuffled = nested_linear(
        permuted(x, group_size),
        permuted(base, group_size // 2),
        permuted(refinement, group_size // 2),
        scale[:, order],
        *args,
    )
    assert torch.equal(shuffled, expected)

    terms = torch.randn(5, len(order)) * scale[0].float()
    in_order, in_another = (reduce(torch.add, t.unbind(1)) for t in (terms, terms[:, order]))
    assert not torch.equal(in_order, in_another)


def test_the_largest_possible_sum_is_exact() -> None:
    """All codes at their extremes, in 2^10 groups."""
    group_size, columns = 128, 128 << 10
    base = pack_base(torch.full((1, columns), -8, dtype=torch.int8), group_size)
    refinement = pack_refinement(torch.zeros(1, columns, dtype=torch.int8), group_size)
    scale = torch.full((1, columns // group_size), 255.0)
    out = nested_linear(torch.ones(1, columns), base, refinement, scale, None, group_size, 16)
    assert out.item() == -8.0 * 255 * columns


def test_integer_matmul_is_exact_at_the_extremes() -> None:
    a = torch.full((3, 512), -127, dtype=torch.int8)
    b = torch.full((2, 512), -128, dtype=torch.int8)
    assert (integer_matmul(a, b) == 512 * 127 * 128).all()


def test_a_weight_on_the_grid_gives_the_product_to_one_rounding() -> None:
    torch.manual_seed(1)
    weight = torch.randint(-7, 8, (9, 64)) * 2.0**-3
    weight[:, 0] = 7 * 2.0**-3
    scale = absmax_scale(weight, 64, 4, torch.bfloat16)
    base = pack_base(round_to_base(weight, scale, 64), 64)
    x = torch.randint(-127, 128, (4, 64)).float()
    x[:, 0] = 127
    assert torch.equal(nested_linear(x, base, None, scale, None, 64, 8), x @ weight.T)
