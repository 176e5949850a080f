"""Writing 16-bit keys and values into a cache of the same numbers, to compare with a nested one.

A program copies some keys and values of one head to their positions.
"""

import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import check_programs
from nestq.kernels.kv_vectors import check_memory
from nestq.reference.dense_kv import check_append

# Vectors that a program of one warp copies.
TOKENS = 4


@triton.jit
def append_16_kernel(
    keys,  # [B, H_kv, n, D] with the strides below
    values,
    positions,  # int64 [B, n]
    key_cache,  # [B, H_kv, S, D]
    value_cache,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    heads,
    capacity,
    count,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = head // heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(positions + batch * count + token, mask=token < count, other=-1)
    real = (slot >= 0) & (slot < capacity)

    column = tl.arange(0, PADDED)[None, :]
    inside = real[:, None] & (column < HEAD_DIM)
    token = token.to(tl.int64)[:, None]
    cached = (head * capacity + slot)[:, None] * HEAD_DIM + column
    at = batch * key_batch_stride + head % heads * key_head_stride + token * key_stride + column
    tl.store(key_cache + cached, tl.load(keys + at, mask=inside), mask=inside)
    at = batch * value_batch_stride + head % heads * value_head_stride
    at += token * value_stride + column
    tl.store(value_cache + cached, tl.load(values + at, mask=inside), mask=inside)


def append_16(
    keys: Tensor, values: Tensor, positions: Tensor, key_cache: Tensor, value_cache: Tensor
) -> None:
    """Write keys and values into the cache at their positions, in place, rounded to its dtype.

    Nothing waits for the device.

    Args:
        keys: float16, bfloat16 or float32 ``[B, H_kv, n, D]``, contiguous along D.
        values: the same.
        positions: int64 ``[B, n]``, contiguous: the slots to write, distinct within a row.
            Nothing is written for a negative position (a pad) or, on a GPU, one that is not below
            the capacity.
        key_cache: float16, bfloat16 or float32 ``[B, H_kv, S, D]``, contiguous.
        value_cache: the same, in the same dtype.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    check_append(keys, values, positions, key_cache, value_cache)
    vectors = {"keys": keys, "values": values, "key_cache": key_cache, "value_cache": value_cache}
    whole = {"positions": positions, "key_cache": key_cache, "value_cache": value_cache}
    check_memory(vectors, whole, keys.device)
    if keys.numel() == 0:
        return
    batch, heads, count, head_dim = keys.shape
    check_programs("batch x heads", batch * heads)
    append_16_kernel[(triton.cdiv(count, TOKENS), batch * heads)](
        keys,
        values,
        positions,
        key_cache,
        value_cache,
        *keys.stride()[:3],
        *values.stride()[:3],
        heads,
        key_cache.shape[2],
        count,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        TOKENS=TOKENS,
        num_warps=1,
    )
