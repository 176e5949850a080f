"""The invariant of nested codes, on any shape, group, overlap and (b, r)."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestq.reference import weights as reference

IN_FEATURES = st.one_of(st.sampled_from([1, 31, 128, 576, 1000]), st.integers(1, 300))
GROUP_SIZES = st.sampled_from([32, 64, 128])
MAGNITUDES = (1e-30, 1e-3, 1.0, 1e30)
KINDS = ("normal", "zeros", "constant rows", "outlier")
# Relative rounding error of float32.
U = 2.0**-24


@dataclass
class Nested:
    """A weight, and all that the reference makes of it."""

    weight: Tensor
    scale: Tensor
    base: Tensor
    refinement: Tensor
    clipped: Tensor
    group_size: int
    overlap: int
    bits: int
    refinement_bits: int


def make_weight(kind: str, rows: int, in_features: int, magnitude: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, in_features, generator=generator)
    if kind == "zeros":
        weight.zero_()
    elif kind == "constant rows":
        weight[:] = weight[:, :1].clone()
    elif kind == "outlier":
        weight[0, seed % in_features] = 1000.0
    return weight * magnitude


@st.composite
def nested(draw: st.DrawFn, group_sizes: st.SearchStrategy[int] = GROUP_SIZES) -> Nested:
    bits, refinement_bits = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    overlap = draw(st.integers(1, 1 << refinement_bits))
    group_size = draw(group_sizes)
    dense = make_weight(
        draw(st.sampled_from(KINDS)),
        draw(st.integers(1, 4)),
        draw(IN_FEATURES),
        draw(st.sampled_from(MAGNITUDES)),
        draw(st.integers(0, 2**31)),
    )
    weight = reference.pad_to_groups(dense, group_size)
    scale = reference.absmax_scale(weight, group_size, bits, torch.bfloat16)
    # A smaller scale makes base codes and refinement codes saturate, as GPTQ's do.
    scale = scale * draw(st.sampled_from([1.0, 0.5]))
    base = reference.round_to_base(weight, scale, group_size, bits)
    refinement, clipped = reference.refine(
        weight, base, scale, group_size, overlap, bits, refinement_bits
    )
    return Nested(
        weight, scale, base, refinement, clipped, group_size, overlap, bits, refinement_bits
    )


@st.composite
def codes(draw: st.DrawFn) -> tuple[Tensor, int]:
    group_size = draw(GROUP_SIZES)
    shape = (*draw(st.lists(st.integers(0, 3), max_size=2)), group_size * draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator), group_size


@given(codes())
def test_unpack_inverts_pack(sample: tuple[Tensor, int]) -> None:
    values, group_size = sample
    base = reference.pack_base(values, group_size)
    refinement = reference.pack_refinement(values, group_size)
    assert base.dtype == refinement.dtype == torch.uint8
    assert base.shape == refinement.shape == (*values.shape[:-1], values.shape[-1] // 2)
    assert torch.equal(reference.unpack_base(base, group_size), values)
    assert torch.equal(reference.unpack_refinement(refinement, group_size), values)


@given(
    st.lists(st.integers(0, 255), min_size=32, max_size=32),
    st.sampled_from([32, 64]),
)
def test_pack_inverts_unpack(values: list[int], group_size: int) -> None:
    plane = torch.tensor(values, dtype=torch.uint8)
    unpacked = reference.unpack_base(plane, group_size)
    assert torch.equal(reference.pack_base(unpacked, group_size), plane)
    unpacked = reference.unpack_refinement(plane, group_size)
    assert torch.equal(reference.pack_refinement(unpacked, group_size), plane)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_layout_byte_by_byte(group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (2, 3 * group_size), dtype=torch.int8, generator=generator)
    base = reference.pack_base(values, group_size).tolist()
    refinement = reference.pack_refinement(values, group_size).tolist()
    half = group_size // 2
    for row, row_codes in enumerate(values.tolist()):
        for group in range(3):
            for j in range(half):
                low, high = (row_codes[group * group_size + k] for k in (j, j + half))
                byte = group * half + j
                assert base[row][byte] == low % 16 + 16 * (high % 16)
                assert refinement[row][byte] == low + 8 + 16 * (high + 8)


@given(nested())
def test_codes_stay_in_their_bits(sample: Nested) -> None:
    low, high = reference.code_range(sample.bits)
    assert low <= sample.base.min() <= sample.base.max() <= high
    low, high = reference.code_range(sample.refinement_bits)
    assert low <= sample.refinement.min() <= sample.refinement.max() <= high
    exact = sample.base.long() * sample.overlap + sample.refinement.long()
    low, high = reference.code_range(sample.bits + sample.refinement_bits)
    assert low <= exact.min() <= exact.max() <= high
    composed = reference.compose(sample.base, sample.refinement, sample.overlap)
    assert composed.dtype == torch.int8
    assert torch.equal(composed.long(), exact)


@given(nested())
def test_composed_minus_base_is_the_refinement(sample: Nested) -> None:
    composed = reference.compose(sample.base, sample.refinement, sample.overlap).long()
    assert torch.equal(composed - sample.overlap * sample.base.long(), sample.refinement.long())


@given(nested(), st.sampled_from([1, 2, 4, 8, 16]))
def test_dequantized_difference_is_the_refinement(sample: Nested, overlap: int) -> None:
    """Exact in float64 where the overlap is a power of two: nothing is rounded."""
    base = reference.pack_base(sample.base, sample.group_size)
    low, high = reference.refinement_bounds(sample.base, overlap)
    refinement = sample.refinement.maximum(low).clamp(max=high)
    arguments = sample.scale, sample.group_size, overlap, sample.weight.shape[1], torch.float64
    plane = reference.pack_refinement(refinement, sample.group_size)
    draft = reference.dequantize(base, None, *arguments)
    target = reference.dequantize(base, plane, *arguments)
    step = reference.expand_scale(sample.scale.double(), sample.group_size) / overlap
    assert torch.equal(draft, sample.base.double() * overlap * step)
    assert torch.equal(target - draft, refinement.double() * step)


@given(nested())
def test_refining_leaves_base_and_scale_alone(sample: Nested) -> None:
    base, scale = sample.base.clone(), sample.scale.clone()
    for overlap in range(1, 17):
        reference.refine(sample.weight, sample.base, sample.scale, sample.group_size, overlap)
    assert torch.equal(sample.base, base)
    assert torch.equal(sample.scale, scale)


@given(nested())
def test_refinement_is_the_nearest_code(sample: Nested) -> None:
    """Where it is not clipped, at most half a target step from the weight, rounding aside.

    float32 rounds ``q s`` (exact: 3 + 8 bits), the residual, its division by s and its
    multiplication by the overlap: three roundings of at most U of the residual, which is below
    ``|W| + 8 s``.
    """
    step = reference.expand_scale(sample.scale.double(), sample.group_size) / sample.overlap
    weight = sample.weight.double()
    target = (sample.base.double() * sample.overlap + sample.refinement.double()) * step
    rounding = 4 * U * (weight.abs() + 8 * sample.overlap * step)
    near = (weight - target).abs() <= step / 2 + rounding
    zero = step == 0
    assert (near | sample.clipped | zero).all()
    assert (sample.refinement[zero] == 0).all()


@given(nested())
def test_clipped_codes_are_at_a_bound(sample: Nested) -> None:
    low, high = reference.refinement_bounds(
        sample.base, sample.overlap, sample.bits, sample.refinement_bits
    )
    at_bound = (sample.refinement == low) | (sample.refinement == high)
    assert at_bound[sample.clipped].all()


def test_lowest_base_code_takes_no_negative_refinement() -> None:
    """BitNest paper, equation 9: with overlap 16, q_r >= 0 where q = -8."""
    base = torch.full((1, 32), -8, dtype=torch.int8)
    weight, scale = torch.full((1, 32), -8.4), torch.ones(1, 1)
    for overlap, expected in ((16, 0), (15, -6), (12, -5), (8, -3)):
        refinement, clipped = reference.refine(weight, base, scale, 32, overlap)
        assert (refinement == expected).all()
        assert clipped.all() == (overlap == 16)


def test_group_of_zeros_has_zero_codes() -> None:
    weight = torch.zeros(2, 64)
    scale = reference.absmax_scale(weight, 32, 4, torch.bfloat16)
    base = reference.round_to_base(weight, scale, 32)
    refinement, clipped = reference.refine(weight, base, scale, 32, 16)
    for tensor in (scale, base, refinement, clipped):
        assert not tensor.any()
