"""The kernels of attention over QuantSpec's planes and buffer, and the sum of their splits."""

import triton
import triton.language as tl

from nestq.kernels.attention_loads import load_keys, load_values
from nestq.kernels.attention_quantspec_split import (
    GROUP,
    attend_planes,
    load_channels,
    load_key_planes,
    load_value_planes,
    planes_scores,
)
from nestq.kernels.attention_split import (
    CHUNK,
    EMPTY,
    SPLIT,
    WARPS,
    attend_split,
    load_query,
    merge_splits,
    normalized,
    split_scores,
    times_two_to,
)
from nestq.kernels.kv_codes import DENSE


@triton.jit
def _seen(position, window, WINDOW: tl.constexpr):
    """For rows at positions: first and last key to see in planes, and first in the buffer."""
    recent = tl.where(position < 0, 0, (position // GROUP - 1) * GROUP)
    first_key = tl.maximum(position - window + 1, 0) if WINDOW else position * 0
    return first_key, recent - 1, tl.maximum(recent, first_key)


@triton.jit
def _splits(first, last, NONE: tl.constexpr):
    """Splits ``[begin, end)`` of the keys from some first to some last ones; NONE without any."""
    begin = tl.min(tl.where(first <= last, first, NONE), axis=0) // SPLIT
    end = tl.max(tl.where(first <= last, last, -1), axis=0) // SPLIT + 1
    return tl.minimum(begin, end), end


@triton.jit
def _store_split(
    sums, exponents, peaks, totals, part, inside, stored, column, split_sums,
    HALF: tl.constexpr,
):  # fmt: skip
    exponent, low, high, peak, total = split_sums
    tl.store(exponents + part, exponent, mask=inside)
    tl.store(peaks + part, peak, mask=inside)
    tl.store(totals + part, total, mask=inside)
    at = sums + part[:, None] * (2 * HALF) + column
    tl.store(at, low, mask=stored)
    tl.store(at + HALF, high, mask=stored)


@triton.jit
def quantspec_kernel(
    query,  # [B, H, n, D] with the strides below
    positions,  # int64 [B, n]
    key_base,  # int8 [B, H_kv, S, D / 2]
    key_refinement,  # the same, or unused
    key_scale,  # float32 [B, H_kv, S / GROUP, D]
    key_zero,
    value_base,
    value_refinement,
    value_scale,  # float32 [B, H_kv, S, VALUE_GROUPS]
    value_zero,
    recent_keys,  # 16-bit [B, H_kv, R, D]
    recent_values,
    out,  # [B, n, H, D], or unused
    sums,  # float32 [B, H_kv, rows, parts, D], or unused, as all below
    exponents,  # float32 [B, H_kv, rows, parts]
    peaks,  # the same
    totals,  # the same
    query_batch_stride,
    query_head_stride,
    query_stride,
    kv_heads,
    group,  # H / H_kv
    capacity,  # S
    count,  # n
    splits,  # of the planes
    recent_splits,  # R / SPLIT
    score_factor,  # scaling * log2(e)
    window,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,  # at least half of it
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of a key that a thread loads at once
    RECENT_VECTOR: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    READ: tl.constexpr,
    WINDOW: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows of one KV head: some splits each to memory, or all to the result.

    Where splits are shared out, the last program takes those of the buffer.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    NONE: tl.constexpr = 1 << 30
    rows = count * group
    cache = tl.program_id(1).to(tl.int64)
    batch = cache // kv_heads
    head = cache % kv_heads * group
    tile = tl.program_id(0)
    if ALL_SPLITS:
        tile = tl.num_programs(0) - 1 - tile  # the last rows see the most keys
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    position = tl.load(positions + batch * count + row // group, mask=inside, other=-1)
    position = tl.minimum(position, capacity + 2 * GROUP - 1).to(tl.int32)
    first_key, last_key, first_recent = _seen(position, window, WINDOW)
    begin, end = _splits(first_key, last_key, NONE)
    limit = tl.max(last_key, axis=0) + 1
    recent_begin, recent_end = _splits(first_recent, position, NONE)
    recent_limit = tl.max(position, axis=0) + 1
    step = 1
    if not ALL_SPLITS:
        step = tl.num_programs(2) - 1
        recent_end = tl.where(tl.program_id(2) == step, recent_end, recent_begin)
        end = tl.where(tl.program_id(2) == step, begin, end)
        begin += tl.program_id(2)

    column = tl.arange(0, PADDED)[None, :]
    stored = inside[:, None] & (column < HALF)
    exponent = tl.full((ROWS,), EMPTY, tl.float32)
    low = tl.zeros((ROWS, PADDED), tl.float32)
    high = tl.zeros((ROWS, PADDED), tl.float32)
    peak = tl.full((ROWS,), EMPTY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    first_part = (cache * rows + row) * (splits + recent_splits + 1)
    query += batch * query_batch_stride

    thread = tl.arange(0, 128)[:, None]
    query_low = ()
    query_high = ()
    for i in tl.static_range(ROWS // 8):
        own = i * 8 + thread % 32 // 4
        own_row = tile * ROWS + own
        own_query = query + (head + own_row % group) * query_head_stride
        own_query += own_row // group * query_stride
        real = own_row < rows
        query_low = query_low + (load_channels(own_query, real, HALF, PADDED, VECTOR),)
        query_high = query_high + (load_channels(own_query + HALF, real, HALF, PADDED, VECTOR),)
    key_base += cache * capacity * HALF
    key_refinement += cache * capacity * HALF
    key_scale += cache * (capacity // GROUP) * HEAD_DIM
    key_zero += cache * (capacity // GROUP) * HEAD_DIM
    value_base += cache * capacity * HALF
    value_refinement += cache * capacity * HALF
    value_scale += cache * capacity * VALUE_GROUPS
    value_zero += cache * capacity * VALUE_GROUPS
    for split in range(begin, end, step):
        start = split * SPLIT
        keys = load_key_planes(key_base, key_refinement, start, limit, HALF, PADDED, VECTOR, READ)
        key_group = split * 2 + thread // 64
        known = key_group * GROUP < limit
        channels = key_group.to(tl.int64) * HEAD_DIM
        scale_low = load_channels(key_scale + channels, known, HALF, PADDED, VECTOR)
        scale_high = load_channels(key_scale + channels + HALF, known, HALF, PADDED, VECTOR)
        zero_low = load_channels(key_zero + channels, known, HALF, PADDED, VECTOR)
        zero_high = load_channels(key_zero + channels + HALF, known, HALF, PADDED, VECTOR)
        key = start + tl.arange(0, WARPS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        scores = planes_scores(
            query_low, query_high, keys, scale_low, scale_high, zero_low, zero_high, key,
            last_key, first_key, score_factor, ROWS, READ, WINDOW, ASM,
        )  # fmt: skip
        values = load_value_planes(value_base, value_refinement, start, limit, HALF, PADDED, READ)
        token = key.to(tl.int64) * VALUE_GROUPS
        scale_low = tl.load(value_scale + token, mask=key < limit, other=0.0)
        zero_low = tl.load(value_zero + token, mask=key < limit, other=0.0)
        scale_high = scale_low
        zero_high = zero_low
        if VALUE_GROUPS == 2:
            scale_high = tl.load(value_scale + token + 1, mask=key < limit, other=0.0)
            zero_high = tl.load(value_zero + token + 1, mask=key < limit, other=0.0)
        part = attend_planes(scores, values, scale_low, scale_high, zero_low, zero_high, READ, ASM)
        if ALL_SPLITS:
            exponent, low, high, peak, total = merge_splits(
                exponent, low, high, peak, total, part[0], part[1], part[2], part[3], part[4]
            )
        else:
            _store_split(
                sums, exponents, peaks, totals, first_part + split, inside, stored, column, part,
                HALF,
            )  # fmt: skip

    tile_row = tl.arange(0, max(ROWS, 16))
    query_row = tile * ROWS + tile_row
    query += (head + query_row % group) * query_head_stride + query_row // group * query_stride
    dtype: tl.constexpr = recent_keys.dtype.element_ty
    dense_low, dense_high, row_factor = load_query(
        query,
        (tile_row < ROWS) & (query_row < rows),
        ROWS,
        HALF,
        PADDED,
        RECENT_VECTOR,
        False,
        dtype,
    )
    row_factor *= score_factor
    recent_keys += cache * recent_splits * SPLIT * HEAD_DIM
    recent_values += cache * recent_splits * SPLIT * HEAD_DIM
    chunk = tl.arange(0, CHUNK)[None, :]
    for split in range(recent_begin, recent_end):
        key = split * SPLIT + tl.arange(0, WARPS)[:, None] * 8 + chunk // 8 * 32 + chunk % 8
        start = split % recent_splits * SPLIT
        slot_limit = start + tl.minimum(recent_limit - split * SPLIT, SPLIT)
        keys = load_keys(
            recent_keys, recent_keys, start, slot_limit, 0, HALF, PADDED, RECENT_VECTOR, DENSE
        )
        scores = split_scores(
            dense_low, dense_high, row_factor, keys, key, key, position, first_recent,
            first_recent, False, DENSE, True, ASM,
        )  # fmt: skip
        values = load_values(
            recent_values, recent_values, start, slot_limit, 0, HALF, PADDED, DENSE
        )
        part = attend_split(scores, values, key, key, first_recent, False, dtype, DENSE, ASM)
        if ALL_SPLITS:
            exponent, low, high, peak, total = merge_splits(
                exponent, low, high, peak, total, part[0], part[1], part[2], part[3], part[4]
            )
        else:
            # The splits of a row's recent keys may be one more than those of the buffer.
            at_part = first_part + splits + split % (recent_splits + 1)
            _store_split(
                sums, exponents, peaks, totals, at_part, inside, stored, column, part, HALF
            )
    if ALL_SPLITS:
        out_row = (batch * count + row // group) * (kv_heads * group) + head + row % group
        at = out + out_row[:, None] * HEAD_DIM + column
        tl.store(at, normalized(low, exponent, peak, total, 0), mask=stored)
        tl.store(at + HALF, normalized(high, exponent, peak, total, 0), mask=stored)


@triton.jit
def combine_quantspec_kernel(
    positions,  # int64 [B, n]
    sums,  # float32 [B, H_kv, rows, parts, D]
    exponents,  # float32 [B, H_kv, rows, parts]
    peaks,
    totals,
    out,  # [B, n, H, D]
    kv_heads,
    group,
    capacity,
    count,
    splits,
    recent_splits,
    window,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Some columns of a row of the result from its splits, in order, as ``merge_splits`` adds them.

    The references are known beforehand: as they are powers of two, that changes no bit.
    """
    rows = count * group
    cache = tl.program_id(0).to(tl.int64) // rows
    row = tl.program_id(0) % rows
    batch = cache // kv_heads
    position = tl.load(positions + batch * count + row // group + tl.arange(0, 1))
    position = tl.minimum(position, capacity + 2 * GROUP - 1).to(tl.int32)
    first_key, last_key, first_recent = _seen(position, window, WINDOW)
    begin, end = _splits(first_key, last_key, 1 << 30)
    recent_begin, recent_end = _splits(first_recent, position, 1 << 30)
    slots = recent_splits + 1
    part = (cache * rows + row) * (splits + slots)

    every = tl.arange(0, PADDED_PARTS)
    slot = tl.maximum(every - splits, 0)
    recent = recent_begin + (slot + slots - recent_begin % slots) % slots
    seen = tl.where(every < splits, (every >= begin) & (every < end), recent < recent_end)
    seen = seen & (every < splits + slots)
    exponent = tl.max(tl.load(exponents + part + every, mask=seen, other=EMPTY), axis=0)
    peak = tl.max(tl.load(peaks + part + every, mask=seen, other=EMPTY), axis=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sum = tl.zeros((1, COLUMNS), tl.float32)
    total = tl.zeros((1,), tl.float32)
    number = end - begin + recent_end - recent_begin
    for first in range(0, number, UNROLL):
        # All loads come before the first sum, else each would wait for the one before.
        loaded = ()
        for i in tl.static_range(UNROLL):
            nth = first + i + tl.arange(0, 1)
            old = begin + nth
            new = recent_begin + (old - end)
            here = part + tl.where(old < end, old, splits + new % slots)
            at = sums + here[:, None] * HEAD_DIM + column
            inside = (nth < number)[:, None] & (column < HEAD_DIM)
            loaded = loaded + (
                tl.load(at, mask=inside, other=0.0),
                tl.load(exponents + here, mask=nth < number, other=EMPTY),
                tl.load(totals + here, mask=nth < number, other=0.0),
                tl.load(peaks + here, mask=nth < number, other=EMPTY),
            )
        for i in tl.static_range(UNROLL):
            sum += times_two_to(loaded[4 * i], (loaded[4 * i + 1] - exponent)[:, None])
            total += times_two_to(loaded[4 * i + 2], loaded[4 * i + 3] - peak)
    exponent = tl.zeros((1,), tl.float32) + exponent
    peak = tl.zeros((1,), tl.float32) + peak
    result = normalized(sum, exponent, peak, total, 0)
    head = cache % kv_heads * group + row % group
    out_row = (batch * count + row // group) * (kv_heads * group) + head
    tl.store(out + out_row * HEAD_DIM + column, result, mask=column < HEAD_DIM)
