"""The kernels of attention: over some splits, over all splits, and the sum of splits."""

import triton
import triton.language as tl

from nestq.kernels.attention_loads import load_keys, load_values
from nestq.kernels.attention_split import (
    CHUNK,
    EMPTY,
    SPLIT,
    WARPS,
    attend_split,
    load_query,
    merge_splits,
    normalized,
    scaled_down,
    split_scores,
)
from nestq.kernels.kv_codes import DENSE, RECENT


@triton.jit
def _visible(
    positions,  # of the batch row
    query_index,  # [R]
    inside,  # [R]
    capacity,
    window,
    WINDOW: tl.constexpr,
):
    """Positions ``[R]``, first visible keys ``[R]``, first split, and the keys' end."""
    position = tl.load(positions + query_index, mask=inside, other=-1)
    position = tl.minimum(position, capacity - 1).to(tl.int32)
    limit = tl.max(position, axis=0) + 1
    first_key = position - window + 1
    begin = 0
    if WINDOW:
        first = tl.min(tl.where(position >= 0, first_key, capacity), axis=0)
        begin = tl.maximum(first, 0) // SPLIT
    return position, first_key, begin, limit


@triton.jit
def _hole(first_local, begin, sink):
    """The first split behind the sink, and how many splits are in the hole that begins there."""
    start = tl.maximum(begin, tl.cdiv(sink, SPLIT))
    return start, tl.maximum(tl.maximum(first_local, 0) // SPLIT - start, 0)


@triton.jit
def _split(index, hole_start, hole, LOCAL: tl.constexpr):
    """The split of an index that does not count those in the hole."""
    if LOCAL:
        return index + tl.where(index >= hole_start, hole, 0)
    else:
        return index


@triton.jit
def _load_scales(scale, key, limit, READ: tl.constexpr):
    """Scales of keys, or the keys where they have none."""
    if READ == DENSE:
        return key
    else:
        return tl.load(scale + key, mask=key < limit, other=0.0)


@triton.jit
def attention_kernel(
    query,  # [B, H, n, D] with the strides below
    positions,  # int64 [B, n]
    key_base,  # int8 [B, H_kv, S, D / 2], or 16-bit [B, H_kv, S, D]
    key_refinement,  # int8 [B, H_kv, S, D / 2], or unused
    key_scale,  # float32 [B, H_kv, S], or unused
    value_base,
    value_refinement,
    value_scale,
    out,  # [B, n, H, D], or unused
    sums,  # float32 [B, H_kv, rows, splits, D], or unused, as all below
    exponents,  # float32 [B, H_kv, rows, splits]
    peaks,  # the same
    totals,  # the same
    query_batch_stride,
    query_head_stride,
    query_stride,
    kv_heads,
    group,  # H / H_kv
    capacity,
    count,  # n
    splits,
    score_factor,  # scaling * log2(e), / 16 for codes
    window,
    recent,
    sink,
    local,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,  # at least half of it
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of a key that a thread loads at once
    READ: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL: tl.constexpr,
    UNIT: tl.constexpr,  # exponent of the step of values
    ALL_SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,  # load values before scores, and the next keys before values are used
    ASM: tl.constexpr,
):
    """Rows of one KV head, query by query: some splits each to memory, or all to the result."""
    HALF: tl.constexpr = HEAD_DIM // 2
    rows = count * group
    cache = tl.program_id(1).to(tl.int64)
    batch = cache // kv_heads
    head = cache % kv_heads * group
    tile = tl.program_id(0)
    if ALL_SPLITS:
        tile = tl.num_programs(0) - 1 - tile  # the last rows see the most keys
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    # Loaded before the positions, so as not to wait for them. A matrix instruction has 16 rows.
    tile_row = tl.arange(0, max(ROWS, 16))
    query_row = tile.to(tl.int64) * ROWS + tile_row
    at = query + batch * query_batch_stride
    at += (head + query_row % group) * query_head_stride + query_row // group * query_stride
    dtype: tl.constexpr = key_base.dtype.element_ty if READ == DENSE else tl.float16
    query_low, query_high, row_factor = load_query(
        at, (tile_row < ROWS) & (query_row < rows), ROWS, HALF, PADDED, VECTOR, READ != DENSE, dtype
    )
    row_factor *= score_factor
    position, first_key, begin, limit = _visible(
        positions + batch * count, row // group, inside, capacity, window, WINDOW
    )
    end = tl.cdiv(limit, SPLIT)
    first_local = position - local + 1
    hole_start = 0
    hole = 0
    if LOCAL:
        # In whole splits, that no row sees.
        first = tl.min(tl.where(position >= 0, first_local, capacity), axis=0)
        hole_start, hole = _hole(first, begin, sink)
        end -= hole
    first_fine = position - recent + 1
    fine_start = 0
    if READ == RECENT:
        # In whole splits, in all of which the refinement of every key is read.
        fine_start = tl.min(tl.where(position >= 0, first_fine, capacity), axis=0)
        fine_start = tl.maximum(fine_start, 0) // SPLIT * SPLIT
    step = 1
    if not ALL_SPLITS:
        begin += tl.program_id(2)
        step = tl.num_programs(2)
        if begin >= end:
            return

    plane = cache * capacity * (HEAD_DIM if READ == DENSE else HALF)
    key_base += plane
    key_refinement += plane
    key_scale += cache * capacity
    value_base += plane
    value_refinement += plane
    value_scale += cache * capacity
    column = tl.arange(0, PADDED)[None, :]
    stored = inside[:, None] & (column < HALF)
    exponent = tl.full((ROWS,), EMPTY, tl.float32)
    low = tl.zeros((ROWS, PADDED), tl.float32)
    high = tl.zeros((ROWS, PADDED), tl.float32)
    peak = tl.full((ROWS,), EMPTY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    warp_key = tl.arange(0, WARPS)[:, None] * 8
    warp_key += (tl.arange(0, CHUNK) // 8 * 32 + tl.arange(0, CHUNK) % 8)[None, :]
    if AHEAD:
        start = _split(begin, hole_start, hole, LOCAL) * SPLIT
        keys = load_keys(
            key_base, key_refinement, start, limit, fine_start, HALF, PADDED, VECTOR, READ
        )
    for index in range(begin, end, step):
        split = _split(index, hole_start, hole, LOCAL)
        start = split * SPLIT
        key = start + warp_key
        key_scales = _load_scales(key_scale, key, limit, READ)
        value_scales = _load_scales(value_scale, key, limit, READ)
        if AHEAD:
            values = load_values(
                value_base, value_refinement, start, limit, fine_start, HALF, PADDED, READ
            )
        else:
            keys = load_keys(
                key_base, key_refinement, start, limit, fine_start, HALF, PADDED, VECTOR, READ
            )
        scores = split_scores(
            query_low, query_high, row_factor, keys, key_scales, key,
            position, first_key, first_fine, start >= fine_start, READ, WINDOW, ASM,
        )  # fmt: skip
        if LOCAL:
            near = (key < sink)[:, None, :] | (key[:, None, :] >= first_local[None, :, None])
            scores = tl.where(near, scores, float("-inf"))
        if AHEAD:
            next_start = _split(index + step, hole_start, hole, LOCAL) * SPLIT
            keys = load_keys(
                key_base, key_refinement, next_start, limit, fine_start,
                HALF, PADDED, VECTOR, READ,
            )  # fmt: skip
        else:
            values = load_values(
                value_base, value_refinement, start, limit, fine_start, HALF, PADDED, READ
            )
        exponent_, low_, high_, peak_, total_ = attend_split(
            scores, values, value_scales, key, first_fine, start >= fine_start, dtype, READ, ASM
        )
        if ALL_SPLITS:
            exponent, low, high, peak, total = merge_splits(
                exponent, low, high, peak, total, exponent_, low_, high_, peak_, total_
            )
        else:
            part = (cache * rows + row) * splits + split
            tl.store(exponents + part, exponent_, mask=inside)
            tl.store(peaks + part, peak_, mask=inside)
            tl.store(totals + part, total_, mask=inside)
            part_sums = sums + part[:, None] * HEAD_DIM + column
            tl.store(part_sums, low_, mask=stored)
            tl.store(part_sums + HALF, high_, mask=stored)
    if ALL_SPLITS:
        out_row = (batch * count + row // group) * kv_heads * group + head + row % group
        at = out + out_row[:, None] * HEAD_DIM + column
        tl.store(at, normalized(low, exponent, peak, total, UNIT), mask=stored)
        tl.store(at + HALF, normalized(high, exponent, peak, total, UNIT), mask=stored)


@triton.jit
def _load_splits(
    sums, exponents, totals, peaks, part, first, end, column, hole_start, hole,
    HEAD_DIM: tl.constexpr, COUNT: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Sums, exponents, totals and peaks of some splits of a row, all loaded before any is used."""
    loaded = ()
    for i in tl.static_range(COUNT):
        split = _split(first + i, hole_start, hole, LOCAL) + tl.arange(0, 1)
        here = part + split
        at = sums + here[:, None] * HEAD_DIM + column
        inside = split < end
        loaded = loaded + (
            (
                tl.load(at, mask=inside[:, None] & (column < HEAD_DIM), other=0.0),
                tl.load(exponents + here, mask=inside, other=EMPTY),
                tl.load(totals + here, mask=inside, other=0.0),
                tl.load(peaks + here, mask=inside, other=EMPTY),
            ),
        )
    return loaded


@triton.jit
def combine_kernel(
    positions,  # int64 [B, n]
    sums,  # float32 [B, H_kv, rows, splits, D]
    exponents,  # float32 [B, H_kv, rows, splits]
    peaks,
    totals,
    out,  # [B, n, H, D]
    kv_heads,
    group,
    capacity,
    count,
    splits,
    window,
    sink,
    local,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Some columns of a row of the result from its splits, in order, as ``merge_splits`` adds them.

    The references are known beforehand: as they are powers of two, that changes no bit.
    """
    rows = count * group
    cache = tl.program_id(0).to(tl.int64) // rows
    row = tl.program_id(0) % rows
    batch = cache // kv_heads
    part = (cache * rows + row) * splits
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    every = tl.arange(0, PADDED_SPLITS)
    position = tl.load(positions + batch * count + row // group)
    position = tl.minimum(position, capacity - 1).to(tl.int32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // SPLIT
    hole_start = 0
    hole = 0
    if LOCAL:
        hole_start, hole = _hole(position - local + 1, begin, sink)
    # Without a window nothing that is loaded waits for the position: what no one wrote is masked
    # afterwards.
    exponent = tl.load(exponents + part + every, mask=every < splits, other=EMPTY)
    peak = tl.load(peaks + part + every, mask=every < splits, other=EMPTY)
    loaded = _load_splits(
        sums, exponents, totals, peaks, part, begin, splits, column, hole_start, hole,
        HEAD_DIM, UNROLL, LOCAL,
    )  # fmt: skip

    end = tl.where(position < 0, 0, position // SPLIT + 1)
    seen = (every >= begin) & (every < end)
    if LOCAL:
        seen = seen & ((every < hole_start) | (every >= hole_start + hole))
        end -= hole
    exponent = tl.max(tl.where(seen, exponent, EMPTY), axis=0)
    peak = tl.max(tl.where(seen, peak, EMPTY), axis=0)
    sum = tl.zeros((1, COLUMNS), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for first in range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            here = first + i + tl.arange(0, 1) < end
            sums_, exponent_, total_, peak_ = loaded[i]
            shift = tl.where(here, exponent_ - exponent, 0.0)[:, None]
            sum += scaled_down(tl.where(here[:, None], sums_, 0.0), shift)
            shift = tl.where(here, peak_ - peak, 0.0)
            total += scaled_down(tl.where(here, total_, 0.0), shift)
        if PADDED_SPLITS > UNROLL:
            loaded = _load_splits(
                sums, exponents, totals, peaks, part, first + UNROLL, splits, column, hole_start,
                hole, HEAD_DIM, UNROLL, LOCAL,
            )  # fmt: skip
    exponent = tl.zeros((1,), tl.float32) + exponent
    peak = tl.zeros((1,), tl.float32) + peak
    result = normalized(sum, exponent, peak, total, UNIT)
    out_row = (batch * count + row // group) * kv_heads * group
    out_row += cache % kv_heads * group + row % group
    tl.store(out + out_row * HEAD_DIM + column, result, mask=column < HEAD_DIM)
