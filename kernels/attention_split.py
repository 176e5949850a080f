"""Attention of some rows over one split of the keys, and how splits are merged: for all kernels.

A split is 256 keys at fixed positions, in four chunks, one a warp: the warp reads its keys and
values straight into operands of matrix instructions. A chunk depends on nothing outside it: it has
its own reference exponents, weights are rounded to float16 relative to them, and the sum of weights
is exact in any order, on a grid. All references are powers of two, so to change one is exact. What
rounds is added in one order: chunks in pairs, splits one after the other. So the bits of a row
depend neither on other rows nor on who computes which split.
"""

import triton
import triton.language as tl

from nestq.kernels.attention_loads import stacked
from nestq.kernels.kv_codes import BASE, DENSE, FINE, RECENT, codes

SPLIT = tl.constexpr(256)
WARPS = tl.constexpr(4)
# Keys of a warp: eight groups of eight, 32 apart.
CHUNK = tl.constexpr(64)
# Rows of a matrix instruction.
MIN_ROWS = tl.constexpr(16)
# The largest element of a query, and the largest weight of a chunk, are just below 2 to this power:
# far from float16's largest number, and its smallest is then 2^-39 of them.
TOP = tl.constexpr(15)
# Exponent of a sum of nothing, below all others.
EMPTY = tl.constexpr(-3.0e38)
# Adding this rounds a number in [0, 1] to multiples of 2^-18, of which 64 add up exactly.
GRID = tl.constexpr(48.0)
# What is this much smaller than the largest weight is zero in the result. Below it the order of
# changes of reference could show, where they leave the normal numbers.
TINY = tl.constexpr(2.0**-64)


@triton.jit
def two_to(exponent):
    """``2 ** exponent`` for whole exponents in [-126, 127]."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def times_two_to(x, exponent):
    """``x * 2 ** exponent`` for whole exponents, exact where the result is normal."""
    half = tl.floor(tl.minimum(tl.maximum(exponent, -252.0), 254.0) * 0.5)
    rest = tl.minimum(tl.maximum(exponent, -252.0), 254.0) - half
    return x * two_to(half) * two_to(rest)


@triton.jit
def scaled_down(x, exponent):
    """``x * 2 ** exponent`` for whole exponents up to 0, exact where the result is normal.

    Below -126 the exponent counts as that: what is so much smaller than another term of a sum does
    not change it, and is zero where it is all there is (``TINY``).
    """
    return x * two_to(tl.maximum(exponent, -126.0))


@triton.jit
def exponent_above(x):
    """Smallest e with ``x < 2 ** e``, as float32, for x >= 0; at least -110."""
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)
    return tl.maximum(exponent, -110.0)


@triton.jit
def load_query(
    at,  # pointers [R or 16] to rows
    inside,  # the same
    R: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    VECTOR: tl.constexpr,
    PLANES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Both halves of rows as operands ``[W, R or 16, PADDED]``, and factors ``[R]``."""
    # k counts pieces, steps, halves, threads and fours, as the operand of keys does. What a thread
    # loads at once are steps, halves and fours; of planes, a code of one word, then of the next.
    k = tl.arange(0, PADDED)
    own = k // 32 % (VECTOR // 8) * 8 + k // 16 % 2 * 4 + k % 4
    if PLANES:
        own = own // 8 * 8 + own % 2 * 4 + own // 2 % 4
    d = (k // (4 * VECTOR) * 4 + k // 4 % 4) * VECTOR + own
    mask = inside[:, None] & (d < HALF)[None, :]
    low = tl.load(at[:, None] + d[None, :], mask=mask, other=0).to(tl.float32)
    high = tl.load(at[:, None] + d[None, :] + HALF, mask=mask, other=0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    exponent = exponent_above(largest)
    factor = two_to(-exponent + TOP)[:, None]
    shape: tl.constexpr = (WARPS, at.shape[0], PADDED)
    low = tl.broadcast_to((low * factor).to(dtype)[None], shape)
    high = tl.broadcast_to((high * factor).to(dtype)[None], shape)
    factor = two_to(exponent - TOP)
    if at.shape[0] != R:
        factor, _ = tl.split(factor.reshape(2, R).permute(1, 0))
    return low, high, factor


@triton.jit
def _elements(split, READ: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Low or high codes, or dense elements, of what was loaded: a tuple of tensors."""
    if READ == DENSE:
        elements = split[1] if HIGH else split[0]
    else:
        elements = ()
        for i in tl.static_range(len(split[0])):
            fine = split[0][i] if READ == BASE else split[1][i]
            elements = elements + (codes(split[0][i], fine, READ, HIGH, ASM),)
    return elements


@triton.jit
def _key_operand(elements):
    """Elements of keys as an operand ``[W, PADDED, 64]``."""
    P: tl.constexpr = len(elements) // 8
    N: tl.constexpr = elements[0].numel // 128
    # warp, g, t, step, half, element of four, group, piece
    x = stacked(elements).reshape(WARPS, 8, 4, N // 8, 2, 4, 8, P)
    return x.permute(0, 7, 3, 4, 2, 5, 6, 1).reshape(WARPS, P * N * 4, CHUNK)


@triton.jit
def _value_operand(elements):
    """Elements of values as an operand ``[W, PADDED, 64]``."""
    E: tl.constexpr = elements[0].shape[1]
    # warp, g, t, element, key of the pair, and of the group: tile, half, pair
    x = stacked(elements).reshape(WARPS, 8, 4, E, 2, 2, 2, 2).permute(0, 3, 1, 5, 6, 2, 7, 4)
    return x.reshape(WARPS, 8 * E, CHUNK)


@triton.jit
def products(
    query_low,
    query_high,
    keys,
    R: tl.constexpr,
    READ: tl.constexpr,
    ASM: tl.constexpr,
):
    """Products ``[W, R, 64]`` of queries and keys, or the codes of keys."""
    low = _key_operand(_elements(keys, READ, False, ASM))
    high = _key_operand(_elements(keys, READ, True, ASM))
    dot = tl.dot(query_high, high, acc=tl.dot(query_low, low))
    if query_low.shape[1] > R:
        dot, _ = tl.split(dot.reshape(WARPS, 2, R, CHUNK).permute(0, 2, 3, 1))
    return dot


@triton.jit
def weight_operand(x):
    """Weights ``[W, R, 64]`` as an operand ``[W, 64, R]``, keys in the order of values."""
    R: tl.constexpr = x.shape[1]
    x = x.reshape(WARPS, R, 2, 2, 2, 4, 2).permute(0, 2, 3, 5, 4, 6, 1)
    return x.reshape(WARPS, CHUNK, R)


@triton.jit
def weighted_sums(weight, values, READ: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """The low or high half ``[W, PADDED, R]`` of weighted sums of a warp's values."""
    return tl.dot(_value_operand(_elements(values, READ, HIGH, ASM)), weight)


@triton.jit
def sum_pairs(x):
    """Sum of the four elements of the last two dimensions, in pairs of neighbours."""
    even, odd = tl.split(x)
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def merge_warps(x, shift):
    """Sum over warps ``[R, PADDED]`` of ``x * 2 ** shift``, elements in their natural order."""
    PADDED: tl.constexpr = x.shape[1]
    R: tl.constexpr = x.shape[2]
    x = scaled_down(x, shift[:, None, :])
    x = x.reshape(2, 2, PADDED // 8, 8, R).permute(4, 3, 2, 0, 1)
    return sum_pairs(x.reshape(R, PADDED, 2, 2))


@triton.jit
def _half_sums(
    weight, fine_weight, values, shift, some_fine,
    READ: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One half ``[R, PADDED]`` of what :func:`attend_split` returns."""
    if READ == RECENT:
        sums = weighted_sums(weight, values, BASE, HIGH, ASM)
        if some_fine:
            sums += weighted_sums(fine_weight, values, FINE, HIGH, ASM)
    else:
        sums = weighted_sums(weight, values, READ, HIGH, ASM)
    return merge_warps(sums, shift)


@triton.jit
def split_scores(
    query_low,  # [W, R or 16, PADDED], from load_query
    query_high,
    row_factor,  # [R]
    keys,  # from load_keys
    scale,  # [W, 64], or unused for dense keys
    key,  # [W, 64]
    position,  # [R], negative for pads
    first_key,  # [R], with a window
    first_fine,  # [R], for RECENT
    some_fine,  # whether a key may be recent, for RECENT
    READ: tl.constexpr,
    WINDOW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scores ``[W, R, 64]`` of a split in base 2; -inf for what a row does not see."""
    R: tl.constexpr = position.shape[0]
    visible = key[:, None, :] <= position[None, :, None]
    if WINDOW:
        visible = visible & (key[:, None, :] >= first_key[None, :, None])
    if READ == RECENT:
        scores = products(query_low, query_high, keys, R, BASE, ASM)
        if some_fine:
            recent = key[:, None, :] >= first_fine[None, :, None]
            scores += tl.where(recent, products(query_low, query_high, keys, R, FINE, ASM), 0.0)
    else:
        scores = products(query_low, query_high, keys, R, READ, ASM)
    if READ != DENSE:
        scores *= scale[:, None, :]
    return tl.where(visible, scores * row_factor[None, :, None], float("-inf"))


@triton.jit
def attend_split(
    scores,  # [W, R, 64]
    values,  # from load_values
    scale,  # as for keys, and so on
    key,
    first_fine,
    some_fine,
    dtype: tl.constexpr,
    READ: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows over the keys of a split.

    Returns:
        The exponent ``[R]`` and, in units of 2 to it, low and high half ``[R, PADDED]`` of the
        weighted sums of values; the exponent ``[R]`` of the sum of weights, and that ``[R]``.
    """
    R: tl.constexpr = scores.shape[1]
    peak = tl.ceil(tl.max(scores, axis=2))
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(scores - reference[:, :, None])
    total = tl.sum((weight + GRID) - GRID, axis=2)
    if READ != DENSE:
        weight = tl.where(scores == float("-inf"), 0.0, weight * scale[:, None, :])
    largest = tl.max(weight, axis=2)
    exponent = exponent_above(largest)
    weight = (weight * two_to(-exponent + TOP)[:, :, None]).to(dtype)

    peak = tl.where(peak == float("-inf"), EMPTY, peak)
    exponent = tl.where(largest == 0, EMPTY, reference + exponent - TOP)
    top_peak = tl.max(peak, axis=0)
    top_exponent = tl.max(exponent, axis=0)
    shift = exponent - top_exponent[None, :]
    total = scaled_down(total, peak - top_peak[None, :])
    total = sum_pairs(total.reshape(2, 2, R).permute(2, 0, 1))
    fine_weight = weight
    if READ == RECENT:
        fine_weight = tl.where(key[:, None, :] >= first_fine[None, :, None], weight, 0.0)
    weight = weight_operand(weight)
    fine_weight = weight_operand(fine_weight)
    low = _half_sums(weight, fine_weight, values, shift, some_fine, READ, False, ASM)
    high = _half_sums(weight, fine_weight, values, shift, some_fine, READ, True, ASM)
    return top_exponent, low, high, top_peak, total


@triton.jit
def merge_splits(
    exponent, low, high, peak, total, next_exponent, next_low, next_high, next_peak, next_total
):
    """What :func:`attend_split` returned for some splits, and for the next one, together."""
    top = tl.maximum(exponent, next_exponent)
    low = scaled_down(low, (exponent - top)[:, None])
    low += scaled_down(next_low, (next_exponent - top)[:, None])
    high = scaled_down(high, (exponent - top)[:, None])
    high += scaled_down(next_high, (next_exponent - top)[:, None])
    top_peak = tl.maximum(peak, next_peak)
    total = scaled_down(total, peak - top_peak)
    total += scaled_down(next_total, next_peak - top_peak)
    return top, low, high, top_peak, total


@triton.jit
def normalized(sums, exponent, peak, total, UNIT: tl.constexpr):
    """The result of rows ``[R, N]``; zero for a row of no weight."""
    sums = tl.where(tl.abs(sums) < TINY, 0.0, sums)
    total = tl.where(total == 0, 1.0, total)
    quotient = tl.div_rn(sums, tl.broadcast_to(total[:, None], sums.shape))
    return times_two_to(quotient, (exponent - peak + UNIT)[:, None])
