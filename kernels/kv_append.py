"""Quantization of keys or values into the planes of the nested cache.

A program nests some vectors of one head and writes them at their positions. What it writes are the
bits of ``nestq.reference.kv``.
"""

import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import check_programs
from nestq.kernels.kv_vectors import (
    check_memory,
    load_halves,
    nest_halves,
    padded,
    tokens_a_program,
)
from nestq.reference.kv import check_planes, check_positions


@triton.jit
def kv_append_kernel(
    states,  # [B, H_kv, n, D] with the strides below
    positions,  # int64 [B, n]
    base,  # uint8 [B, H_kv, S, D / 2]
    refinement,
    scale,  # float32 [B, H_kv, S]
    states_batch_stride,
    states_head_stride,
    states_stride,
    heads,
    capacity,
    count,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = head // heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(positions + batch * count + token, mask=token < count, other=-1)
    real = (slot >= 0) & (slot < capacity)

    column = tl.arange(0, PADDED)[None, :]
    at = batch * states_batch_stride + head % heads * states_head_stride
    at = states + at + (token.to(tl.int64) * states_stride)[:, None] + column
    # Pads are read too, so that nothing waits for the positions.
    low, high = load_halves(at, (token < count)[:, None] & (column < HALF), HALF)
    entry = head * capacity + slot
    nest_halves(low, high, base, refinement, scale, entry, real, column, HALF)


def kv_append(
    states: Tensor, positions: Tensor, base: Tensor, refinement: Tensor, scale: Tensor
) -> None:
    """Quantize keys or values and write them into the cache at their positions, in place.

    The bits are those of ``nestq.reference.kv.kv_append``. Nothing waits for the device.

    Args:
        states: float16, bfloat16 or float32 ``[B, H_kv, n, D]``, contiguous along D.
        positions: int64 ``[B, n]``, contiguous: the slots to write, distinct within a row.
            Nothing is written for a negative position (a pad) or, on a GPU, one that is not below
            the capacity.
        base: uint8 ``[B, H_kv, S, D / 2]``; all planes and scales are contiguous.
        refinement: the same.
        scale: float32 ``[B, H_kv, S]``.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    check_planes("cache", base, refinement, scale)
    shape = tuple(states.shape)
    if len(shape) != 4 or (*shape[:2], shape[3]) != (*base.shape[:2], 2 * base.shape[3]):
        raise ValueError(
            f"states must be [B, H_kv, n, D] for a base plane {tuple(base.shape)} "
            f"[B, H_kv, S, D / 2], got {shape}"
        )
    batch, heads, count, head_dim = shape
    check_positions(positions, batch, count, capacity=base.shape[2])
    whole = {"positions": positions, "base": base, "refinement": refinement, "scale": scale}
    check_memory({"states": states}, whole, states.device)
    if states.numel() == 0:
        return
    check_programs("batch x heads", batch * heads)
    half = head_dim // 2
    columns = padded(half)
    tokens = tokens_a_program(batch * heads * count, columns)
    kv_append_kernel[(triton.cdiv(count, tokens), batch * heads)](
        states,
        positions,
        base,
        refinement,
        scale,
        *states.stride()[:3],
        heads,
        base.shape[2],
        count,
        HALF=half,
        PADDED=columns,
        TOKENS=tokens,
        num_warps=1,
        enable_fp_fusion=False,
    )
