"""Nested KV cache entries: quantization, reading back, writing (BitNest paper, A.2).

One vector x of head size D is one group with one scale s and D codes::

    s = max|x| / 7        q4 = clip(round(x / s), -8, 7)
    q_r = clip(round((x - q4 s) / (s / 16)), -8, 7)
    draft = q4 s          target = (16 q4 + q_r) s / 16

Planes are packed like one group of a weight: byte j holds code j in its low and code j + D/2 in
its high nibble; the base in two's complement, the refinement as ``q_r + 8``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nestq.reference import weights

OVERLAP = 16
SCALE_DTYPE = torch.float32


def quantize_kv(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nest keys or values ``[..., D]``, D even, each vector on its own (paper eqs. 11 and 13).

    Returns:
        base uint8 ``[..., D / 2]``, refinement uint8 ``[..., D / 2]``, scale float32 ``[...]``.
        A zero vector has scale 0 and zero codes; a vector with NaN has scale NaN.
    """
    x = states.to(SCALE_DTYPE)
    head_dim = x.shape[-1]
    scale = weights.absmax_scale(x, head_dim, 4, SCALE_DTYPE)
    base_codes = weights.round_to_base(x, scale, head_dim)
    refinement_codes, _ = weights.refine(x, base_codes, scale, head_dim, OVERLAP)
    base = weights.pack_base(base_codes, head_dim)
    return base, weights.pack_refinement(refinement_codes, head_dim), scale.squeeze(-1)


def dequantize_kv(
    base: Tensor, refinement: Tensor | None, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Dense keys or values ``[..., D]`` (paper eqs. 12 and 14): the draft's without a refinement.

    Args:
        base: uint8 ``[..., D / 2]``.
        refinement: uint8 ``[..., D / 2]`` or None.
        scale: ``[...]``.
        dtype: of the result.
    """
    head_dim = 2 * base.shape[-1]
    return weights.dequantize(
        base, refinement, scale.unsqueeze(-1), head_dim, OVERLAP, head_dim, dtype
    )


def kv_append(
    states: Tensor, positions: Tensor, base: Tensor, refinement: Tensor, scale: Tensor
) -> None:
    """Quantize keys or values and write them into the cache at their positions, in place.

    Nothing waits for the device, so the writes can be captured in a CUDA graph.

    Args:
        states: ``[B, H_kv, n, D]``.
        positions: int64 ``[B, n]``: the slots to write, distinct within a row. A negative
            position marks a pad, which is not written.
        base: uint8 ``[B, H_kv, S, D / 2]``.
        refinement: uint8 ``[B, H_kv, S, D / 2]``.
        scale: float32 ``[B, H_kv, S]``.

    Raises:
        ValueError: a shape does not fit or, on a CPU, a position is not below S.
    """
    check_append(states, positions, base, refinement, scale)
    if states.shape[2] == 0:
        return
    write_at((base, refinement, scale), quantize_kv(states), positions)


def check_append(
    states: Tensor, positions: Tensor, base: Tensor, refinement: Tensor, scale: Tensor
) -> None:
    """Refuse arguments of :func:`kv_append` whose dtypes or shapes do not fit, by name."""
    check_planes("cache", base, refinement, scale)
    batch, heads, count, head_dim = states.shape
    if (batch, heads, head_dim) != (base.shape[0], base.shape[1], 2 * base.shape[3]):
        raise ValueError(
            f"states must be [B, H_kv, n, D] for a base plane {tuple(base.shape)} "
            f"[B, H_kv, S, D / 2], got {tuple(states.shape)}"
        )
    check_positions(positions, batch, count, capacity=base.shape[2])


def write_at(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Write entries into caches at their positions, in place; nothing waits for the device.

    Args:
        caches: each ``[B, H_kv, S, ...]``.
        entries: for each cache ``[B, H_kv, n, ...]``, n at least 1.
        positions: int64 ``[B, n]``; nothing is written for a negative one.
    """
    # A pad repeats the write of a real entry of its row, which changes nothing. A row of pads
    # only writes back what slot 0 holds.
    real = positions >= 0
    donor = real.long().argmax(1, keepdim=True)
    source = torch.where(real, torch.arange(positions.shape[1], device=positions.device), donor)
    slot = positions.gather(1, source).clamp(min=0)
    any_real = real.any(1)
    for plane, new in zip(caches, entries, strict=True):
        source_index, slot_index = (_expand(index, new) for index in (source, slot))
        kept = plane.gather(2, slot_index)
        written = torch.where(_expand(any_real, new), new.gather(2, source_index), kept)
        plane.scatter_(2, slot_index, written)


def _expand(index: Tensor, like: Tensor) -> Tensor:
    """Broadcast ``[B, n]`` or ``[B]`` over heads and bytes to the shape of ``like``."""
    index = index[:, None] if index.dim() == 2 else index[:, None, None]
    return (index if like.dim() == 3 else index.unsqueeze(-1)).expand_as(like)


def check_planes(name: str, base: Tensor, refinement: Tensor | None, scale: Tensor) -> None:
    """Refuse planes that do not belong together, by name."""
    if base.dim() != 4 or base.dtype != torch.uint8:
        raise ValueError(
            f"{name} base must be uint8 [B, H_kv, S, D / 2], "
            f"got {base.dtype} of shape {tuple(base.shape)}"
        )
    if refinement is not None and (refinement.shape, refinement.dtype) != (base.shape, base.dtype):
        raise ValueError(
            f"{name} refinement must be uint8 of shape {tuple(base.shape)}, "
            f"got {refinement.dtype} of shape {tuple(refinement.shape)}"
        )
    if scale.shape != base.shape[:3] or scale.dtype != SCALE_DTYPE:
        raise ValueError(
            f"{name} scale must be {SCALE_DTYPE} of shape {tuple(base.shape[:3])}, "
            f"got {scale.dtype} of shape {tuple(scale.shape)}"
        )


def check_positions(positions: Tensor, batch: int, count: int, capacity: int) -> None:
    """Refuse positions that are not int64 ``[batch, count]`` or, on a CPU, not in the cache."""
    if tuple(positions.shape) != (batch, count) or positions.dtype != torch.int64:
        raise ValueError(
            f"positions must be int64 of shape {(batch, count)}, "
            f"got {positions.dtype} of shape {tuple(positions.shape)}"
        )
    if positions.device.type == "cpu" and positions.numel() and positions.max() >= capacity:
        raise ValueError(
            f"positions must be below the cache's capacity {capacity}, got {positions.max().item()}"
        )
