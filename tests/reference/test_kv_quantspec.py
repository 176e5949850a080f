"""QuantSpec's KV quantization against its definition, number by number, and writes in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nested_kv import random
from torch import Tensor

from nestq.reference.kv_quantspec import (
    GROUP,
    composed_codes,
    dequantize_keys,
    dequantize_values,
    first_recent,
    quantize_keys,
    quantize_values,
    value_groups,
    write_key_group,
    write_recent,
    write_value_group,
)


def empty_planes(batch: int, heads: int, groups: int, head_dim: int) -> tuple[list[Tensor], ...]:
    """Planes of keys and of values, full of something."""
    codes = batch, heads, groups * GROUP, head_dim // 2
    scales = (batch, heads, groups, head_dim), (*codes[:3], value_groups(head_dim))
    keys, values = (
        [torch.full(codes, 0xA5, dtype=torch.uint8) for _ in range(2)]
        + [torch.full(shape, -3.0) for _ in range(2)]
        for shape in scales
    )
    return keys, values


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_upper_nibble_from_the_smallest_number_and_a_lower_one_of_its_error(
    head_dim: int,
) -> None:
    """As the paper writes it: an unsigned code above the smallest number, in float64."""
    states = random(2, 2 * GROUP, head_dim) + 3 * random(head_dim, seed=1)
    keys, values = quantize_keys(states), quantize_values(states)
    channels = states.double().unflatten(-2, (2, GROUP))
    tokens = states.double().unflatten(-1, (value_groups(head_dim), -1))
    for planes, x, axis in ((keys, channels, -2), (values, tokens, -1)):
        base, refinement, scale, zero = planes
        lowest, highest = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
        step = (highest - lowest) / 15
        # Float32 rounds the step, the zero point and what remains of a number.
        slack = 2.0**-23 * 16 * x.abs().amax() / step
        upper = (composed_codes(base, None).double() / 16 + 8).view_as(x)
        both = (composed_codes(base, refinement).double() + 128).view_as(x)
        ideal = (x - lowest) / step
        assert upper.min() == 0
        assert upper.max() == 15
        assert ((ideal - upper).abs() <= 0.5 + slack).all()
        lower = both - 16 * upper
        assert lower.min() >= -8
        # An error of half a step upwards would be 8, which is clipped to 7.
        assert ((16 * ideal - both).abs() <= torch.where(lower == 7, 1, 0.5) + 16 * slack).all()
        rounding = 2.0**-21 * x.abs().max()
        assert (scale.double() - step.squeeze(axis)).abs().max() <= rounding
        assert (zero.double() - (lowest + 8 * step).squeeze(axis)).abs().max() <= rounding


def test_the_groups_of_keys_are_channels_and_of_values_tokens() -> None:
    states = torch.zeros(2 * GROUP, 64)
    states[GROUP + 5, 7] = 1
    *_, key_scale, _ = quantize_keys(states)
    *_, value_scale, _ = quantize_values(states)

    assert key_scale.shape == (2, 64)
    assert key_scale.nonzero().tolist() == [[1, 7]]
    assert value_scale.nonzero().tolist() == [[GROUP + 5, 0]]


@given(st.integers(0, 2**31), st.sampled_from([2, 64, 128, 256]), st.floats(-4, 4))
@settings(max_examples=30, deadline=None)
def test_reading_back_is_off_by_half_a_step(seed: int, head_dim: int, offset: float) -> None:
    states = (random(3, GROUP, head_dim, seed=seed) + offset) * 10 ** random(head_dim, seed=seed)
    for quantize, dequantize, size in (
        (quantize_keys, dequantize_keys, GROUP),
        (quantize_values, dequantize_values, head_dim // value_groups(head_dim)),
    ):
        base, refinement, scale, zero = quantize(states)
        step = (
            scale.repeat_interleave(GROUP, -2)
            if quantize is quantize_keys
            else scale.repeat_interleave(size, -1)
        )
        # Zero points, and numbers less these, are float32 numbers of up to 9 steps and the center.
        rounding = 2.0**-22 * (states.abs() + 16 * step)
        draft = dequantize(base, None, scale, zero, torch.float64)
        target = dequantize(base, refinement, scale, zero, torch.float64)
        assert ((draft - states).abs() <= step / 2 + rounding).all()
        assert ((target - states).abs() <= step / 16 + rounding).all()


def test_equal_numbers_are_exact_and_nan_shows() -> None:
    states = torch.full((GROUP, 4), 0.1)
    states[:, 1] = torch.nan
    states[:, 2] = 0
    read = dequantize_keys(*quantize_keys(states), torch.float32)
    torch.testing.assert_close(read, states, rtol=0, atol=0, equal_nan=True)
    tokens = states.T.contiguous()
    read = dequantize_values(*quantize_values(tokens), torch.float32)
    torch.testing.assert_close(read, tokens, rtol=0, atol=0, equal_nan=True)


@given(st.integers(0, 10**6))
def test_recent_tokens_are_those_from_the_group_before_on(position: int) -> None:
    first = int(first_recent(torch.tensor(position)))
    for group in range(max(position // GROUP - 3, 0), position // GROUP + 1):
        assert (group * GROUP < first) == (position >= (group + 2) * GROUP)
    assert GROUP + 1 <= position - first + 1 <= 2 * GROUP


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], int]:
    """For each row, blocks (tokens, accepted of them), and the size of the block."""
    size = draw(st.integers(1, 24))
    block = st.integers(1, size).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
    rows = draw(st.lists(st.lists(block, min_size=1, max_size=40), min_size=1, max_size=3))
    return rows, size


@settings(max_examples=15, deadline=None)
@given(conversations())
def test_blocks_with_rejected_tokens_leave_the_planes_of_the_whole_sequence(
    conversation: tuple[list[list[tuple[int, int]]], int],
) -> None:
    """Tokens are written in blocks, some rejected; groups are quantized as they fill up."""
    rows, size = conversation
    batch, heads, head_dim, groups = len(rows), 2, 4, 8
    truth = random(batch, heads, groups * GROUP, head_dim)
    buffer = torch.full((batch, heads, 2 * GROUP + size - 1, head_dim), torch.nan)
    keys, values = empty_planes(batch, heads, groups, head_dim)
    before = [plane.clone() for plane in keys + values]
    lengths, quantized = [0] * batch, [0] * batch
    for step in range(max(map(len, rows))):
        positions = torch.full((batch, size), -1)
        states = torch.full((batch, heads, size, head_dim), torch.nan)
        for b, row in enumerate(rows):
            if step < len(row):
                count, accepted = row[step]
                positions[b, size - count :] = torch.arange(lengths[b], lengths[b] + count)
                known = truth[b, :, lengths[b] : lengths[b] + accepted]
                states[b, :, size - count : size - count + accepted] = known
                lengths[b] += accepted
        write_recent(states, positions, buffer)
        full = [length // GROUP for length in lengths]
        group = torch.tensor([q if f > q else -1 for f, q in zip(full, quantized, strict=True)])
        write_key_group(buffer, group, *keys)
        write_value_group(buffer, group, *values)
        quantized = full
    for b, length in enumerate(lengths):
        assert quantized[b] == length // GROUP
        end = quantized[b] * GROUP
        expected = [*quantize_keys(truth[b, :, :end]), *quantize_values(truth[b, :, :end])]
        for plane, whole, old in zip(keys + values, expected, before, strict=True):
            done = whole.shape[1]
            assert torch.equal(plane[b, :, :done], whole)
            assert torch.equal(plane[b, :, done:], old[b, :, done:])
        recent = range(max(int(first_recent(torch.tensor(length))), 0), length)
        slots = [token % buffer.shape[2] for token in recent]
        assert torch.equal(buffer[b, :, slots], truth[b, :, recent])


def test_buffers_are_rounded_to_their_dtype() -> None:
    states, buffer = random(1, 1, 3, 4), torch.zeros(1, 1, 5, 4, dtype=torch.bfloat16)
    write_recent(states, torch.tensor([[4, 5, 6]]), buffer)
    assert torch.equal(buffer[:, :, [4, 0, 1]], states.bfloat16())
    assert not buffer[:, :, [2, 3]].any()


@pytest.mark.parametrize("head_dim", [63, 130, 192])
def test_a_head_that_groups_do_not_divide_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 128, got {head_dim}"):
        quantize_values(torch.zeros(1, head_dim))


def test_part_of_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="T a multiple of 128"):
        quantize_keys(torch.zeros(1, GROUP - 1, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(1, 2, GROUP - 1, 4)}, "R >= 128"),
        ({0: torch.zeros(1, 2, GROUP, 6)}, "buffer must be"),
        ({1: torch.tensor([3])}, "group must be below the cache's 3, got 3"),
        ({1: torch.tensor([[0]])}, "group must be int64 of shape"),
        ({2: torch.zeros(1, 2, 130, 2, dtype=torch.uint8)}, "S a multiple of 128"),
        ({3: torch.zeros(1, 2, GROUP, 2, dtype=torch.uint8)}, "key refinement must be"),
        ({4: torch.zeros(1, 2, 3)}, "key scale must be"),
        ({5: torch.zeros(1, 2, 2, 4)}, "key zero must be"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(change: dict[int, Tensor], message: str) -> None:
    keys, _ = empty_planes(1, 2, 3, 4)
    arguments = dict(enumerate([torch.zeros(1, 2, GROUP, 4), torch.tensor([0]), *keys]))
    with pytest.raises(ValueError, match=message):
        write_key_group(*(arguments | change).values())


def test_values_and_recent_tokens_that_do_not_fit_are_refused() -> None:
    keys, _ = empty_planes(1, 2, 3, 4)
    buffer = torch.zeros(1, 2, GROUP, 4)
    with pytest.raises(ValueError, match="value scale must be"):
        write_value_group(buffer, torch.tensor([0]), *keys)
    with pytest.raises(ValueError, match="R >= n"):
        write_recent(torch.zeros(1, 2, GROUP + 1, 4), torch.zeros(1, GROUP + 1).long(), buffer)
    with pytest.raises(ValueError, match="positions must be int64"):
        write_recent(torch.zeros(1, 2, 3, 4), torch.zeros(1, 3), buffer)
