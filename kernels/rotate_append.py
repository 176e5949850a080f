"""Rotary embedding of queries and keys, and keys and values into the nested cache, in one launch.

A program rotates some queries of one head, or rotates and nests some keys, or nests some values.
The bits are those of ``nestq.reference.rotary``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import check_programs
from nestq.kernels.kv_vectors import (
    check_memory,
    load_halves,
    nest_halves,
    padded,
    rotate_halves,
    tokens_a_program,
    transform_halves,
)
from nestq.reference.hadamard import hadamard_block
from nestq.reference.rotary import check_rotate_append


@triton.jit
def rotate_append_kernel(
    query,  # [B, H, n, D] with the strides below
    key,  # [B, H_kv, n, D] with the strides below
    value,
    cos,  # [B, n, D] with the strides below
    sin,
    positions,  # int64 [B, n]
    key_base,  # uint8 [B, H_kv, S, D / 2]
    key_refinement,
    key_scale,  # float32 [B, H_kv, S]
    value_base,
    value_refinement,
    value_scale,
    out,  # [B, H, n, D]
    query_batch_stride,
    query_head_stride,
    query_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    angle_batch_stride,
    angle_stride,
    query_heads,
    heads,
    capacity,
    count,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,  # of a transform, inside a half; None for no transform
):
    dtype: tl.constexpr = query.dtype.element_ty
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = token.to(tl.int64)
    column = tl.arange(0, PADDED)[None, :]
    inside = (token < count)[:, None] & (column < HALF)
    angle = batch * angle_batch_stride + (row * angle_stride)[:, None] + column
    if head < query_heads:
        at = batch * query_batch_stride + head * query_head_stride + row * query_stride
        low, high = load_halves(query + at[:, None] + column, inside, HALF)
        low, high = rotate_halves(low, high, cos + angle, sin + angle, inside, HALF, dtype)
        if STEPS is not None:
            low, high = transform_halves(low, high, HALF, STEPS, dtype)
        at = ((batch * query_heads + head) * count + row) * (2 * HALF)
        target = out + at[:, None] + column
        tl.store(target, low.to(dtype), mask=inside)
        tl.store(target + HALF, high.to(dtype), mask=inside)
    else:
        slot = tl.load(positions + batch * count + token, mask=token < count, other=-1)
        real = (slot >= 0) & (slot < capacity)
        if head < query_heads + heads:
            head -= query_heads
            at = batch * key_batch_stride + head * key_head_stride + row * key_stride
            low, high = load_halves(key + at[:, None] + column, inside, HALF)
            low, high = rotate_halves(low, high, cos + angle, sin + angle, inside, HALF, dtype)
            if STEPS is not None:
                low, high = transform_halves(low, high, HALF, STEPS, dtype)
            entry = (batch * heads + head) * capacity + slot
            nest_halves(low, high, key_base, key_refinement, key_scale, entry, real, column, HALF)
        else:
            head -= query_heads + heads
            at = batch * value_batch_stride + head * value_head_stride + row * value_stride
            low, high = load_halves(value + at[:, None] + column, inside, HALF)
            entry = (batch * heads + head) * capacity + slot
            nest_halves(
                low, high, value_base, value_refinement, value_scale, entry, real, column, HALF
            )


def rotate_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_base: Tensor,
    key_refinement: Tensor,
    key_scale: Tensor,
    value_base: Tensor,
    value_refinement: Tensor,
    value_scale: Tensor,
    transform: bool = False,
) -> Tensor:
    """Rotate queries and keys, and write rotated keys and values into the cache, in place.

    The bits are those of ``nestq.reference.rotary.rotate_append``. Nothing waits for the device.

    Args:
        query: float16, bfloat16 or float32 ``[B, H, n, D]``, contiguous along D.
        key: ``[B, H_kv, n, D]``, in the dtype of query, contiguous along D.
        value: the same.
        cos: ``[B or 1, n, D]``, in the dtype of query, contiguous along D.
        sin: the same.
        positions: int64 ``[B, n]``, contiguous, as in ``kv_append``; the query of a pad is rotated.
        key_base: uint8 ``[B, H_kv, S, D / 2]``; all planes and scales are contiguous.
        key_refinement: the same.
        key_scale: float32 ``[B, H_kv, S]``.
        value_base: as of keys.
        value_refinement: as of keys.
        value_scale: as of keys.
        transform: whether rotated queries and keys are then transformed as by ``hadamard``; of a
            head size that is a power of two.

    Returns:
        The rotated queries, transformed if keys are, contiguous ``[B, H, n, D]``.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    keys = key_base, key_refinement, key_scale
    values = value_base, value_refinement, value_scale
    check_rotate_append(query, key, value, cos, sin, positions, keys, values)
    vectors = {"query": query, "key": key, "value": value, "cos": cos, "sin": sin}
    whole = {"positions": positions}
    whole |= {"key base": key_base, "key refinement": key_refinement, "key scale": key_scale}
    whole |= {"value base": value_base, "value refinement": value_refinement}
    whole |= {"value scale": value_scale}
    check_memory(vectors, whole, query.device)
    if transform and hadamard_block(query.shape[3]) != query.shape[3]:
        raise ValueError(
            "transform must be False for a head size that is no power of two, "
            f"got D = {query.shape[3]}"
        )
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    batch, query_heads, count, head_dim = query.shape
    heads = key.shape[1]
    if count == 0 or batch == 0:
        return out
    all_heads = query_heads + 2 * heads
    check_programs("heads of queries, keys and values", all_heads)
    check_programs("batch", batch)
    half = head_dim // 2
    columns = padded(half)
    tokens = tokens_a_program(batch * all_heads * count, columns)
    rotate_append_kernel[(triton.cdiv(count, tokens), all_heads, batch)](
        query,
        key,
        value,
        cos,
        sin,
        positions,
        *keys,
        *values,
        out,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        query_heads,
        heads,
        key_base.shape[2],
        count,
        HALF=half,
        PADDED=columns,
        TOKENS=tokens,
        STEPS=half.bit_length() - 1 if transform else None,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out
