"""Writes into QuantSpec's cache: new tokens into the buffers, groups that are due into the planes.

One launch does both. Some programs copy tokens; the others look whether a group is due, which is so
in one of 128 steps, and nest a part of it. They read other slots than the copies write. What they
write are the bits of ``nestq.reference.kv_quantspec``.
"""

import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import check_programs
from nestq.kernels.kv_vectors import check_memory, load_halves, nested_codes, nibbles
from nestq.reference.kv_quantspec import check_key_planes, check_value_planes
from nestq.reference.quantspec import check_append

GROUP = tl.constexpr(128)
MAX_HEAD_DIM = 256
# Tokens that a program copies.
TOKENS = 8
# Channels of each half of keys, and tokens of values, that a program nests.
KEY_COLUMNS = 16
VALUE_TOKENS = 16


@triton.jit
def _extent(x, inside, axis: tl.constexpr):
    """Smallest and largest element along an axis, both NaN if one is; 0 without any inside."""
    nothing = tl.max(inside.to(tl.int32), axis=axis) == 0
    smallest = tl.min(tl.where(inside, x, float("inf")), axis=axis)
    largest = tl.max(tl.where(inside, x, float("-inf")), axis=axis)
    smallest = tl.where(nothing, 0.0, smallest)
    largest = tl.where(nothing, 0.0, largest)
    nan = tl.max((inside & (x != x)).to(tl.int32), axis=axis) > 0
    return tl.where(nan, float("nan"), smallest), tl.where(nan, float("nan"), largest)


@triton.jit
def _step_and_zero(smallest, largest):
    """Scale and zero point of groups (paper 4.2)."""
    step = tl.div_rn(largest - smallest, 15.0)
    return step, smallest + step * 8.0


@triton.jit
def _store_codes(low, high, low_step, high_step, base, refinement, at, inside):
    """Nest halves of vectors, less their zero points, by steps that broadcast to them."""
    low_base, low_fine = nested_codes(low, low_step, tl.where(low_step > 0, low_step, 1.0))
    high_base, high_fine = nested_codes(high, high_step, tl.where(high_step > 0, high_step, 1.0))
    tl.store(base + at, nibbles(low_base, high_base, 0), mask=inside)
    tl.store(refinement + at, nibbles(low_fine, high_fine, 8), mask=inside)


@triton.jit
def _nest_keys(
    recent, base, refinement, scale, zero, head, group, capacity, slots, first_column,
    HALF: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Nest some channels of a group of keys: a channel is a group of codes."""
    token = group * GROUP + tl.arange(0, GROUP).to(tl.int64)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    inside = (column < HALF) & (token >= 0)
    slot = head * slots + token % slots
    low, high = load_halves(recent + slot * (2 * HALF) + column, inside, HALF)
    smallest, largest = _extent(low, inside, 0)
    low_step, low_zero = _step_and_zero(smallest, largest)
    smallest, largest = _extent(high, inside, 0)
    high_step, high_zero = _step_and_zero(smallest, largest)
    at = (head * capacity + token) * HALF + column
    _store_codes(
        low - low_zero[None, :], high - high_zero[None, :], low_step[None, :], high_step[None, :],
        base, refinement, at, inside,
    )  # fmt: skip
    channel = first_column + tl.arange(0, COLUMNS)
    at = (head * (capacity // GROUP) + group) * (2 * HALF) + channel
    tl.store(scale + at, low_step, mask=channel < HALF)
    tl.store(scale + at + HALF, high_step, mask=channel < HALF)
    tl.store(zero + at, low_zero, mask=channel < HALF)
    tl.store(zero + at + HALF, high_zero, mask=channel < HALF)


@triton.jit
def _nest_values(
    recent, base, refinement, scale, zero, head, first_token, capacity, slots,
    HALF: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, VALUE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Nest the values of some tokens: a token is a group of codes, or each half of it is."""
    token = first_token + tl.arange(0, TOKENS).to(tl.int64)
    column = tl.arange(0, PADDED)[None, :]
    inside = (column < HALF) & (token >= 0)[:, None]
    slot = head * slots + token % slots
    low, high = load_halves(recent + slot[:, None] * (2 * HALF) + column, inside, HALF)
    smallest, largest = _extent(low, inside, 1)
    high_smallest, high_largest = _extent(high, inside, 1)
    if VALUE_GROUPS == 1:
        nan = (smallest != smallest) | (high_smallest != high_smallest)
        smallest = tl.where(nan, float("nan"), tl.minimum(smallest, high_smallest))
        largest = tl.where(nan, float("nan"), tl.maximum(largest, high_largest))
        high_smallest = smallest
        high_largest = largest
    low_step, low_zero = _step_and_zero(smallest, largest)
    high_step, high_zero = _step_and_zero(high_smallest, high_largest)
    entry = head * capacity + token
    _store_codes(
        low - low_zero[:, None], high - high_zero[:, None], low_step[:, None], high_step[:, None],
        base, refinement, entry[:, None] * HALF + column, inside,
    )  # fmt: skip
    tl.store(scale + entry * VALUE_GROUPS, low_step)
    tl.store(zero + entry * VALUE_GROUPS, low_zero)
    if VALUE_GROUPS == 2:
        tl.store(scale + entry * 2 + 1, high_step)
        tl.store(zero + entry * 2 + 1, high_zero)


@triton.jit
def quantspec_append_kernel(
    keys,  # [B, H_kv, n, D] with the strides below
    values,
    positions,  # int64 [B, n]
    recent_keys,  # [B, H_kv, R, D]
    recent_values,
    key_base,  # uint8 [B, H_kv, S, D / 2]
    key_refinement,
    key_scale,  # float32 [B, H_kv, S / GROUP, D]
    key_zero,
    value_base,
    value_refinement,
    value_scale,  # float32 [B, H_kv, S, VALUE_GROUPS]
    value_zero,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    heads,
    capacity,
    count,
    slots,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,  # at least HALF
    VALUE_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_TOKENS: tl.constexpr,
):
    """Copies of some tokens of one head, or a part of a group that may be due."""
    head = tl.program_id(1).to(tl.int64)
    batch = head // heads
    copies = tl.cdiv(count, TOKENS)
    if tl.program_id(0) < copies:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        position = tl.load(positions + batch * count + token, mask=token < count, other=-1)
        column = tl.arange(0, PADDED)[None, :]
        inside = (position >= 0)[:, None] & (column < HALF)
        token = token.to(tl.int64)[:, None]
        slot = (head * slots + position % slots)[:, None] * (2 * HALF) + column
        at = batch * key_batch_stride + head % heads * key_head_stride + token * key_stride + column
        low, high = load_halves(keys + at, inside, HALF)
        tl.store(recent_keys + slot, low, mask=inside)
        tl.store(recent_keys + slot + HALF, high, mask=inside)
        at = batch * value_batch_stride + head % heads * value_head_stride
        at += token * value_stride + column
        low, high = load_halves(values + at, inside, HALF)
        tl.store(recent_values + slot, low, mask=inside)
        tl.store(recent_values + slot + HALF, high, mask=inside)
    else:
        KEY_PARTS: tl.constexpr = (HALF + KEY_COLUMNS - 1) // KEY_COLUMNS
        PARTS: tl.constexpr = KEY_PARTS + GROUP // VALUE_TOKENS
        part = (tl.program_id(0) - copies) % PARTS
        last = tl.load(positions + batch * count + count - 1)
        # Where the last token is a pad, none of them is due.
        boundary = last // GROUP - (tl.program_id(0) - copies) // PARTS
        group = boundary - 2
        due = (boundary * GROUP > last - count) & (group >= 0) & (group < capacity // GROUP)
        if due:
            if part < KEY_PARTS:
                _nest_keys(
                    recent_keys, key_base, key_refinement, key_scale, key_zero, head, group,
                    capacity, slots, part * KEY_COLUMNS, HALF, KEY_COLUMNS,
                )  # fmt: skip
            else:
                first = group * GROUP + (part - KEY_PARTS) * VALUE_TOKENS
                _nest_values(
                    recent_values, value_base, value_refinement, value_scale, value_zero, head,
                    first, capacity, slots, HALF, PADDED, VALUE_TOKENS, VALUE_GROUPS,
                )  # fmt: skip


def quantspec_append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    recent_keys: Tensor,
    key_base: Tensor,
    key_refinement: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    recent_values: Tensor,
    value_base: Tensor,
    value_refinement: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
) -> None:
    """Write keys and values into the buffers, and quantize the groups that are due, in place.

    The bits are those of ``nestq.reference.quantspec.quantspec_append``. Nothing waits for the
    device: on a GPU nobody checks that positions are consecutive, and groups beyond S are dropped.

    Args:
        keys: float16, bfloat16 or float32 ``[B, H_kv, n, D]``, contiguous along D; D is at most
            128, or 256. n is at most R - 256.
        values: the same.
        positions: int64 ``[B, n]``, contiguous, consecutive; negative for pads, on the left.
        recent_keys: float16, bfloat16 or float32 ``[B, H_kv, R, D]``; like all that follow,
            contiguous.
        key_base: uint8 ``[B, H_kv, S, D / 2]``, S a multiple of 128.
        key_refinement: the same.
        key_scale: float32 ``[B, H_kv, S / 128, D]``.
        key_zero: the same.
        recent_values: as for keys.
        value_base: as for keys.
        value_refinement: as for keys.
        value_scale: float32 ``[B, H_kv, S, V]``, V of ``value_groups(D)``.
        value_zero: the same.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    check_append(keys, values, positions, recent_keys, recent_values, key_base, value_base)
    check_key_planes(key_base, key_refinement, key_scale, key_zero)
    check_value_planes(value_base, value_refinement, value_scale, value_zero)
    vectors = {
        "keys": keys,
        "values": values,
        "recent_keys": recent_keys,
        "recent_values": recent_values,
    }
    whole = {
        "positions": positions,
        "recent_keys": recent_keys,
        "recent_values": recent_values,
        "key_base": key_base,
        "key_refinement": key_refinement,
        "key_scale": key_scale,
        "key_zero": key_zero,
        "value_base": value_base,
        "value_refinement": value_refinement,
        "value_scale": value_scale,
        "value_zero": value_zero,
    }
    check_memory(vectors, whole, keys.device)
    batch, heads, count, head_dim = keys.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"keys must have a head size of at most {MAX_HEAD_DIM}, got {head_dim}")
    if keys.numel() == 0:
        return
    check_programs("batch x heads", batch * heads)
    half = head_dim // 2
    parts = triton.cdiv(half, KEY_COLUMNS) + GROUP.value // VALUE_TOKENS
    programs = triton.cdiv(count, TOKENS) + triton.cdiv(count, GROUP.value) * parts
    quantspec_append_kernel[(programs, batch * heads)](
        keys,
        values,
        positions,
        recent_keys,
        recent_values,
        key_base,
        key_refinement,
        key_scale,
        key_zero,
        value_base,
        value_refinement,
        value_scale,
        value_zero,
        *keys.stride()[:3],
        *values.stride()[:3],
        heads,
        key_base.shape[2],
        count,
        recent_keys.shape[2],
        HALF=half,
        PADDED=triton.next_power_of_2(half),
        VALUE_GROUPS=value_scale.shape[3],
        TOKENS=TOKENS,
        KEY_COLUMNS=KEY_COLUMNS,
        VALUE_TOKENS=VALUE_TOKENS,
        num_warps=4,
        enable_fp_fusion=False,
    )
