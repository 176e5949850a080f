"""Attention of some rows over a split of QuantSpec's planes, as ``attention_split`` has it.

A split is two groups of keys, and a warp takes half a group, so that its keys share scales and zero
points by channel. They go into the query, which each warp scales as its threads hold it for the
matrix instruction::

    q . k = sum_d (q_d s_d / 16) code_d + sum_d q_d z_d

The scales of values go into weights, and their zero points are summed apart. These sums of zero
points are exact, on a grid, so in any order.
"""

import triton
import triton.language as tl

from nestq.kernels.attention_loads import join_halves, load_plane
from nestq.kernels.attention_split import (
    CHUNK,
    EMPTY,
    GRID,
    TOP,
    WARPS,
    exponent_above,
    merge_warps,
    products,
    sum_pairs,
    times_two_to,
    two_to,
    weight_operand,
    weighted_sums,
)
from nestq.kernels.kv_codes import BASE

GROUP = tl.constexpr(128)
# Adding these rounds a number in [-1, 1] to multiples of 2^-16, and what remains of it to multiples
# of 2^-33: 2^8 of either add up exactly.
COARSE_GRID = tl.constexpr(192.0)
FINE_GRID = tl.constexpr(1.5 * 2.0**-10)
# Adding this rounds a weighted zero point, below 2^22, to multiples of 2^4: 64 add up exactly.
ZERO_GRID = tl.constexpr(1.5 * 2.0**27)
# A zero point this many times a scale lets weights be small, far from the largest of float16.
ZERO_TO_SCALE = tl.constexpr(0.125)


@triton.jit
def load_key_planes(
    base,
    refinement,
    start,  # first key of the split
    limit,  # key behind the last one to load
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    VECTOR: tl.constexpr,
    READ: tl.constexpr,
):
    """What ``attention_loads.load_keys`` returns, for keys of which a warp's lie together."""
    P: tl.constexpr = PADDED // (4 * VECTOR)
    N: tl.constexpr = VECTOR // 4
    thread = tl.arange(0, 128)[:, None]
    coarse = ()
    fine = ()
    for i in tl.static_range(8 * P):
        key = start + thread // 32 * CHUNK + thread % 32 // 4 + i // P * 8
        element = thread % 4 * N + tl.arange(0, N)[None, :] + i % P * (4 * N)
        x = load_plane(base, key, element, key < limit, HALF, READ)
        coarse = coarse + (x.reshape(128, N // 2, 2),)
        if READ != BASE:
            x = load_plane(refinement, key, element, key < limit, HALF, READ)
            fine = fine + (x.reshape(128, N // 2, 2),)
    return coarse, fine


@triton.jit
def load_value_planes(
    base, refinement, start, limit, HALF: tl.constexpr, PADDED: tl.constexpr, READ: tl.constexpr
):
    """What ``attention_loads.load_values`` returns, for keys of which a warp's lie together."""
    N: tl.constexpr = PADDED // 32
    thread = tl.arange(0, 128)[:, None]
    element = thread % 32 // 4 * N + tl.arange(0, N)[None, :]
    coarse = ()
    fine = ()
    for i in tl.static_range(8):
        even = start + thread // 32 * CHUNK + thread % 4 * 2 + i * 8
        odd = even + 1
        first = load_plane(base, even, element, even < limit, HALF, READ)
        second = load_plane(base, odd, element, odd < limit, HALF, READ)
        coarse = coarse + (tl.join(first, second),)
        if READ != BASE:
            first = load_plane(refinement, even, element, even < limit, HALF, READ)
            second = load_plane(refinement, odd, element, odd < limit, HALF, READ)
            fine = fine + (tl.join(first, second),)
    return coarse, fine


@triton.jit
def load_channels(
    at,  # pointers [128, 1] of threads to the half of their row, g of the second dimension
    inside,  # bool [128, 1]
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A half of channels in float32, ``[W, 8, PADDED]`` in the order of a key operand."""
    thread = tl.arange(0, 128)[:, None]
    parts = ()
    for i in tl.static_range(PADDED // 16):
        element = (i // (VECTOR // 4) * 4 + thread % 4) * VECTOR
        element += i % (VECTOR // 4) * 4 + tl.arange(0, 4)[None, :]
        x = tl.load(at + element, mask=inside & (element < HALF), other=0.0)
        parts = parts + (x.to(tl.float32),)
    parts = join_halves(parts)
    if PADDED >= 64:
        parts = join_halves(parts)
    if PADDED == 128:
        parts = join_halves(parts)
    # warp, g, t, half, upper bit of four, piece, step, lower bit
    P: tl.constexpr = PADDED // (4 * VECTOR)
    x = parts[0].reshape(WARPS, 8, 4, 2, 2, P, VECTOR // 8, 2).permute(0, 1, 5, 6, 3, 2, 4, 7)
    return x.reshape(WARPS, 8, PADDED)


@triton.jit
def _exact_sum(low, high):
    """Sums ``[W, 8]`` of the elements of both, near float32, in any order."""
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=2)
    exponent = exponent_above(largest)
    factor = two_to(-exponent)[:, :, None]
    low *= factor
    high *= factor
    coarse_low = (low + COARSE_GRID) - COARSE_GRID
    coarse_high = (high + COARSE_GRID) - COARSE_GRID
    fine_low = ((low - coarse_low) + FINE_GRID) - FINE_GRID
    fine_high = ((high - coarse_high) + FINE_GRID) - FINE_GRID
    total = tl.sum(coarse_low + coarse_high, axis=2) + tl.sum(fine_low + fine_high, axis=2)
    return total * two_to(exponent)


@triton.jit
def _scaled_query(query_low, query_high, scale_low, scale_high, zero_low, zero_high):
    """Eight rows ``[W, 8, PADDED]`` times scales in float16, and times zero points.

    Returns:
        The low and the high half, the factor ``[W, 8]`` of a product of them with codes, and what
        is to be added to that, ``[W, 8]``.
    """
    low = query_low * scale_low
    high = query_high * scale_high
    exponent = exponent_above(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=2))
    factor = two_to(-exponent + TOP)[:, :, None]
    low = (low * factor).to(tl.float16)
    high = (high * factor).to(tl.float16)
    offset = _exact_sum(query_low * zero_low, query_high * zero_high)
    return low, high, two_to(exponent - TOP) * 0.0625, offset


@triton.jit
def _sixteen(x, y):
    """Two times eight rows ``[W, 8]`` as ``[W, 16]``."""
    return tl.join(x, y).permute(0, 2, 1).reshape(WARPS, 16)


@triton.jit
def _sixteen_rows(x, y):
    """Two times eight rows ``[W, 8, PADDED]`` as ``[W, 16, PADDED]``."""
    return tl.join(x, y).permute(0, 3, 1, 2).reshape(WARPS, 16, x.shape[2])


@triton.jit
def planes_scores(
    query_low,  # a tensor [W, 8, PADDED] for each 8 rows, from load_channels
    query_high,
    keys,  # from load_key_planes
    scale_low,  # [W, 8, PADDED], the same for all 8, from load_channels
    scale_high,
    zero_low,
    zero_high,
    key,  # [W, 64]
    last_key,  # [R], negative for rows that see none
    first_key,  # [R], with a window
    score_factor,
    R: tl.constexpr,
    READ: tl.constexpr,
    WINDOW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scores ``[W, R, 64]`` of a split in base 2; -inf for what a row does not see."""
    low, high, factor, offset = _scaled_query(
        query_low[0], query_high[0], scale_low, scale_high, zero_low, zero_high
    )
    if R == 16:
        next_low, next_high, next_factor, next_offset = _scaled_query(
            query_low[1], query_high[1], scale_low, scale_high, zero_low, zero_high
        )
        factor = _sixteen(factor, next_factor)
        offset = _sixteen(offset, next_offset)
    else:
        next_low = tl.zeros_like(low)
        next_high = tl.zeros_like(high)
    low = _sixteen_rows(low, next_low)
    high = _sixteen_rows(high, next_high)
    scores = products(low, high, keys, R, READ, ASM) * factor[:, :, None]
    scores = (scores + offset[:, :, None]) * score_factor
    visible = key[:, None, :] <= last_key[None, :, None]
    if WINDOW:
        visible = visible & (key[:, None, :] >= first_key[None, :, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _half_sums(
    weight, seen, factor, scale, zero, values, shift,
    READ: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weighted sums ``[R, PADDED]`` of one half of values, over the warps."""
    scaled = tl.where(seen, weight * scale[:, None, :], 0.0) * factor[:, :, None]
    sums = weighted_sums(weight_operand(scaled.to(tl.float16)), values, READ, HIGH, ASM)
    # A factor may be so large that only its product with what it belongs to is finite.
    shifted = tl.where(seen, weight * zero[:, None, :], 0.0) * factor[:, :, None] * 16.0
    sums += tl.sum((shifted + ZERO_GRID) - ZERO_GRID, axis=2)[:, None, :]
    return merge_warps(sums, shift)


@triton.jit
def attend_planes(
    scores,  # [W, R, 64]
    values,  # from load_value_planes
    scale_low,  # [W, 64]
    scale_high,
    zero_low,
    zero_high,
    READ: tl.constexpr,
    ASM: tl.constexpr,
):
    """What ``attention_split.attend_split`` returns, its first exponent for values as they are."""
    R: tl.constexpr = scores.shape[1]
    seen = scores != float("-inf")
    peak = tl.ceil(tl.max(scores, axis=2))
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(scores - reference[:, :, None])
    total = tl.sum((weight + GRID) - GRID, axis=2)
    size = tl.maximum(tl.abs(zero_low), tl.abs(zero_high)) * ZERO_TO_SCALE
    size = tl.maximum(tl.maximum(scale_low, scale_high), size)
    largest = tl.max(tl.where(seen, weight * size[:, None, :], 0.0), axis=2)
    exponent = exponent_above(largest)
    factor = two_to(-exponent + TOP)

    peak = tl.where(peak == float("-inf"), EMPTY, peak)
    exponent = tl.where(largest == 0, EMPTY, reference + exponent - TOP - 4)
    top_peak = tl.max(peak, axis=0)
    top_exponent = tl.max(exponent, axis=0)
    shift = exponent - top_exponent[None, :]
    total = times_two_to(total, peak - top_peak[None, :])
    total = sum_pairs(total.reshape(2, 2, R).permute(2, 0, 1))
    low = _half_sums(weight, seen, factor, scale_low, zero_low, values, shift, READ, False, ASM)
    high = _half_sums(weight, seen, factor, scale_high, zero_high, values, shift, READ, True, ASM)
    return top_exponent, low, high, top_peak, total
