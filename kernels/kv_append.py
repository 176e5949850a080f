"""Quantization of keys or values into the planes of the nested cache, optionally after rotation.

A program nests some vectors of one head and writes them at their positions. What it writes are the
bits of ``nestq.reference.kv``: every operation rounds once, and divisions are IEEE's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.rounding import round_half_even
from nestq.reference.kv import check_planes, check_positions

STATE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Vectors that a program of one warp nests.
TOKENS = 4


@triton.jit
def _rotated(x, partner, cos, sin, dtype: tl.constexpr):
    """``x * cos + partner * sin``, each operation rounded to ``dtype``."""
    kept = (x * cos).to(dtype).to(tl.float32)
    turned = (partner * sin).to(dtype).to(tl.float32)
    return (kept + turned).to(dtype).to(tl.float32)


@triton.jit
def _codes(x, scale, safe):
    """Base and refinement codes of ``[TOKENS, HALF]`` in float32 (paper A.2)."""
    base = round_half_even(tl.div_rn(x, safe))
    base = tl.where(scale > 0, tl.minimum(tl.maximum(base, -8.0), 7.0), 0.0)
    rest = tl.div_rn(x - base * scale, safe) * 16.0
    # The composed code stays in eight bits.
    lowest = tl.where(base == -8.0, 0.0, -8.0)
    fine = tl.minimum(tl.maximum(round_half_even(rest), lowest), 7.0)
    return base, tl.where(scale > 0, fine, 0.0)


@triton.jit
def _nibbles(low, high, bias):
    """Codes in float32 as the low and the high nibbles of bytes."""
    low = (low.to(tl.int32) + bias) & 0x0F
    high = (high.to(tl.int32) + bias) & 0x0F
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def kv_append_kernel(
    states,  # [B, H_kv, n, D] with the strides below
    cos,  # [B, n, D] with the strides below, or unused
    sin,
    positions,  # int64 [B, n]
    base,  # uint8 [B, H_kv, S, D / 2]
    refinement,
    scale,  # float32 [B, H_kv, S]
    states_batch_stride,
    states_head_stride,
    states_stride,
    angle_batch_stride,
    angle_stride,
    heads,
    capacity,
    count,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    dtype: tl.constexpr = states.dtype.element_ty
    head = tl.program_id(1).to(tl.int64)
    batch = head // heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(positions + batch * count + token, mask=token < count, other=-1)
    real = (slot >= 0) & (slot < capacity)

    column = tl.arange(0, PADDED)[None, :]
    inside = real[:, None] & (column < HALF)
    at = batch * states_batch_stride + head % heads * states_head_stride
    at = states + at + (token.to(tl.int64) * states_stride)[:, None] + column
    low = tl.load(at, mask=inside, other=0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0).to(tl.float32)
    if ROTATE:
        at = batch * angle_batch_stride + token.to(tl.int64) * angle_stride
        at = at[:, None] + column
        cos_low = tl.load(cos + at, mask=inside, other=0).to(tl.float32)
        cos_high = tl.load(cos + at + HALF, mask=inside, other=0).to(tl.float32)
        sin_low = tl.load(sin + at, mask=inside, other=0).to(tl.float32)
        sin_high = tl.load(sin + at + HALF, mask=inside, other=0).to(tl.float32)
        unrotated = low
        low = _rotated(low, -high, cos_low, sin_low, dtype)
        high = _rotated(high, unrotated, cos_high, sin_high, dtype)

    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    # A maximum skips NaN; the vector's scale must not.
    nan = tl.max(((low != low) | (high != high)).to(tl.int32), axis=1) > 0
    step = tl.div_rn(tl.where(nan, float("nan"), largest), 7.0)
    safe = tl.where(step > 0, step, 1.0)[:, None]
    low_base, low_fine = _codes(low, step[:, None], safe)
    high_base, high_fine = _codes(high, step[:, None], safe)

    entry = head * capacity + slot
    at = entry[:, None] * HALF + column
    tl.store(base + at, _nibbles(low_base, high_base, 0), mask=inside)
    tl.store(refinement + at, _nibbles(low_fine, high_fine, 8), mask=inside)
    tl.store(scale + entry, step, mask=real)


def kv_append(
    states: Tensor,
    positions: Tensor,
    base: Tensor,
    refinement: Tensor,
    scale: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
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
        cos: dtype of the states, ``[B, n, D]``, contiguous along D: rotate first, as transformers
            does (``states * cos + rotate_half(states) * sin`` in the dtype of the states); None
            for no rotation.
        sin: the same; None with cos.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    check_planes("cache", base, refinement, scale)
    if states.dim() != 4 or states.dtype not in STATE_DTYPES or states.stride(-1) != 1:
        raise ValueError(
            "states must be float16, bfloat16 or float32 [B, H_kv, n, D], contiguous along D, "
            f"got {states.dtype} of shape {tuple(states.shape)} and strides {states.stride()}"
        )
    batch, heads, count, head_dim = states.shape
    if (batch, heads, head_dim) != (base.shape[0], base.shape[1], 2 * base.shape[3]):
        raise ValueError(
            f"states must be [B, H_kv, n, D] for a base plane {tuple(base.shape)} "
            f"[B, H_kv, S, D / 2], got {tuple(states.shape)}"
        )
    check_positions(positions, batch, count, capacity=base.shape[2])
    whole = {"positions": positions, "base": base, "refinement": refinement, "scale": scale}
    for name, tensor in whole.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must both be given or both be None")
    angles = {} if cos is None or sin is None else {"cos": cos, "sin": sin}
    for name, angle in angles.items():
        expected = batch, count, head_dim
        if tuple(angle.shape) != expected or angle.dtype != states.dtype:
            raise ValueError(
                f"{name} must be {states.dtype} of shape {expected}, "
                f"got {angle.dtype} of shape {tuple(angle.shape)}"
            )
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if cos is not None and cos.stride(-1) != 1:
        raise ValueError(f"cos must be contiguous along D, got strides {cos.stride()}")
    for name, tensor in (whole | angles).items():
        if tensor.device != states.device:
            raise ValueError(
                f"{name} must be on the device of states, {states.device}, got {tensor.device}"
            )
    if states.numel() == 0:
        return
    half = head_dim // 2
    kv_append_kernel[(triton.cdiv(count, TOKENS), batch * heads)](
        states,
        states if cos is None else cos,
        states if sin is None else sin,
        positions,
        base,
        refinement,
        scale,
        *states.stride()[:3],
        *((0, 0) if cos is None else cos.stride()[:2]),
        heads,
        base.shape[2],
        count,
        HALF=half,
        PADDED=max(triton.next_power_of_2(half), 32),
        TOKENS=TOKENS,
        ROTATE=cos is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
