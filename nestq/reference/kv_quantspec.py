"""QuantSpec's hierarchical KV cache: quantization, reading back, writing (QuantSpec paper, 4.2).

The numbers of a group, from smallest lo to largest hi, share a scale and a zero point::

    s = (hi - lo) / 15    z = lo + 8 s
    q_u = clip(round((x - z) / s), -8, 7)
    q_l = clip(round((x - z - q_u s) / (s / 16)), -8, 7)
    draft = q_u s + z     target = (16 q_u + q_l) s / 16 + z

The paper's upper nibble counts from 0 to 15 above lo. Here it is stored less 8, and the zero point
is the value of a stored 0: the same numbers, and planes as those of ``nestq.reference.kv``.
A group of keys is one channel of ``GROUP`` tokens from a multiple of ``GROUP`` on; a group of
values is ``GROUP`` channels of one token, or all channels of a smaller head.

Precision is a function of positions alone: the query at position p reads tokens from
``first_recent(p)`` on, which are G + 1 to 2 G tokens, in full precision, and older ones quantized.
The former are kept in a buffer of R slots, token j in slot ``j % R``. For n queries at consecutive
positions R is at least ``2 G + n - 1``. A group may be quantized once no token of it can be
rejected any more and must be before a query at ``(group + 2) G``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nestq.reference import weights

GROUP = 128
OVERLAP = 16
SCALE_DTYPE = torch.float32
# Half the range of the upper nibble: what is subtracted to store it.
MIDDLE = 8
LEVELS = 15


def first_recent(position: Tensor) -> Tensor:
    """Position of the first token that queries at some positions read in full precision.

    It is negative in the first two groups, where nothing is read quantized.
    """
    return (torch.div(position, GROUP, rounding_mode="floor") - 1) * GROUP


def value_groups(head_dim: int) -> int:
    """Groups of a value vector.

    Raises:
        ValueError: the head is neither even and at most a group nor whole groups.
    """
    if head_dim % 2 or (head_dim > GROUP and head_dim % GROUP):
        raise ValueError(
            f"head_dim must be even and at most {GROUP}, or a multiple of {GROUP}, got {head_dim}"
        )
    return max(head_dim // GROUP, 1)


def quantize_keys(states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize full groups of keys ``[..., T, D]``, T a multiple of ``GROUP``, by channel.

    Returns:
        base uint8 ``[..., T, D / 2]``, refinement uint8 ``[..., T, D / 2]``, scale and zero point
        float32 ``[..., T / GROUP, D]``. A channel of equal numbers has scale 0, zero codes and
        that number as its zero point; one with a number that is not finite has scale NaN or inf.

    Raises:
        ValueError: T is not a multiple of ``GROUP``.
    """
    if states.shape[-2] % GROUP:
        raise ValueError(
            f"states must be [..., T, D] with T a multiple of {GROUP}, got {tuple(states.shape)}"
        )
    channels = states.to(SCALE_DTYPE).unflatten(-2, (-1, GROUP)).mT
    base, refinement, scale, zero = _quantize(channels)
    head_dim = states.shape[-1]
    base, refinement = (x.mT.flatten(-3, -2).contiguous() for x in (base, refinement))
    return *_pack(base, refinement, head_dim), scale, zero


def quantize_values(states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize values ``[..., D]``, each token on its own.

    Returns:
        base uint8 ``[..., D / 2]``, refinement uint8 ``[..., D / 2]``, scale and zero point
        float32 ``[..., V]``, V = ``value_groups(D)``; special cases as for keys.

    Raises:
        ValueError: groups do not divide the head.
    """
    head_dim = states.shape[-1]
    groups = value_groups(head_dim)
    base, refinement, scale, zero = _quantize(states.to(SCALE_DTYPE).unflatten(-1, (groups, -1)))
    return *_pack(base.flatten(-2), refinement.flatten(-2), head_dim), scale, zero


def dequantize_keys(
    base: Tensor, refinement: Tensor | None, scale: Tensor, zero: Tensor, dtype: torch.dtype
) -> Tensor:
    """Dense keys ``[..., T, D]``: the draft's without a refinement.

    Args:
        base: uint8 ``[..., T, D / 2]``.
        refinement: the same, or None.
        scale: ``[..., T / GROUP, D]``.
        zero: the same.
        dtype: of the result, and of the arithmetic.
    """
    codes = composed_codes(base, refinement).to(dtype).unflatten(-2, (-1, GROUP))
    step = scale.to(dtype) / OVERLAP
    return (codes * step.unsqueeze(-2) + zero.to(dtype).unsqueeze(-2)).flatten(-3, -2)


def dequantize_values(
    base: Tensor, refinement: Tensor | None, scale: Tensor, zero: Tensor, dtype: torch.dtype
) -> Tensor:
    """Dense values ``[..., D]``: the draft's without a refinement.

    Args:
        base: uint8 ``[..., D / 2]``.
        refinement: the same, or None.
        scale: ``[..., V]``.
        zero: the same.
        dtype: of the result, and of the arithmetic.
    """
    codes = composed_codes(base, refinement).to(dtype).unflatten(-1, (scale.shape[-1], -1))
    step = scale.to(dtype) / OVERLAP
    return (codes * step.unsqueeze(-1) + zero.to(dtype).unsqueeze(-1)).flatten(-2)


def composed_codes(base: Tensor, refinement: Tensor | None) -> Tensor:
    """Codes int8 ``[..., D]`` in steps of s / 16: of both planes, or of the base."""
    head_dim = 2 * base.shape[-1]
    codes = weights.unpack_base(base, head_dim)
    if refinement is None:
        return codes * OVERLAP
    return weights.compose(codes, weights.unpack_refinement(refinement, head_dim), OVERLAP)


def write_recent(states: Tensor, positions: Tensor, buffer: Tensor) -> None:
    """Write keys or values into a full-precision buffer, in place, without waiting for the device.

    Args:
        states: ``[B, H_kv, n, D]``.
        positions: int64 ``[B, n]``, in a row at most R different ones after each other; a negative
            position marks a pad, which is not written.
        buffer: ``[B, H_kv, R, D]`` in the dtype in which keys and values are kept.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    batch, heads, count, head_dim = states.shape
    slots = buffer.shape[2] if buffer.dim() == 4 else 0
    if tuple(buffer.shape) != (batch, heads, slots, head_dim) or count > slots:
        raise ValueError(
            f"buffer must be [B, H_kv, R, D] with R >= n for states {tuple(states.shape)} "
            f"[B, H_kv, n, D], got {tuple(buffer.shape)}"
        )
    if tuple(positions.shape) != (batch, count) or positions.dtype != torch.int64:
        raise ValueError(
            f"positions must be int64 of shape {(batch, count)}, "
            f"got {positions.dtype} of shape {tuple(positions.shape)}"
        )
    if count == 0:
        return
    # A pad repeats the write of a real token of its row. A row of pads writes back what it holds.
    real = positions >= 0
    donor = real.long().argmax(1, keepdim=True)
    source = torch.where(real, torch.arange(count, device=positions.device), donor)
    slot = (positions.gather(1, source) % slots)[:, None, :, None].expand_as(states)
    new = states.to(buffer.dtype).gather(2, source[:, None, :, None].expand_as(states))
    kept = buffer.gather(2, slot)
    buffer.scatter_(2, slot, torch.where(real.any(1)[:, None, None, None], new, kept))


def write_key_group(
    buffer: Tensor, group: Tensor, base: Tensor, refinement: Tensor, scale: Tensor, zero: Tensor
) -> None:
    """Quantize one group of keys a row from the buffer into the cache, in place.

    Nothing waits for the device, so the writes can be captured in a CUDA graph.

    Args:
        buffer: ``[B, H_kv, R, D]``, R >= ``GROUP``, with all tokens of the group.
        group: int64 ``[B]``: tokens from ``group * GROUP`` on; negative to leave a row as it is.
        base: uint8 ``[B, H_kv, S, D / 2]``, S a multiple of ``GROUP``.
        refinement: uint8 ``[B, H_kv, S, D / 2]``.
        scale: float32 ``[B, H_kv, S / GROUP, D]``.
        zero: float32 ``[B, H_kv, S / GROUP, D]``.

    Raises:
        ValueError: a shape or dtype does not fit or, on a CPU, a group is not in the cache.
    """
    check_key_planes(base, refinement, scale, zero)
    _write_group(quantize_keys, buffer, group, base, refinement, scale, zero)


def write_value_group(
    buffer: Tensor, group: Tensor, base: Tensor, refinement: Tensor, scale: Tensor, zero: Tensor
) -> None:
    """Quantize the values of one group of tokens a row from the buffer into the cache, in place.

    Args:
        buffer: as for :func:`write_key_group`, and so are ``group``, ``base`` and ``refinement``.
        group: int64 ``[B]``.
        base: uint8 ``[B, H_kv, S, D / 2]``.
        refinement: uint8 ``[B, H_kv, S, D / 2]``.
        scale: float32 ``[B, H_kv, S, V]``.
        zero: float32 ``[B, H_kv, S, V]``.

    Raises:
        ValueError: a shape or dtype does not fit or, on a CPU, a group is not in the cache.
    """
    check_value_planes(base, refinement, scale, zero)
    _write_group(quantize_values, buffer, group, base, refinement, scale, zero)


def check_key_planes(base: Tensor, refinement: Tensor | None, scale: Tensor, zero: Tensor) -> None:
    """Refuse planes of keys that do not belong together, by name."""
    _check_codes("key", base, refinement)
    batch, heads, capacity, half = base.shape
    _check_scales("key", scale, zero, (batch, heads, capacity // GROUP, 2 * half))


def check_value_planes(
    base: Tensor, refinement: Tensor | None, scale: Tensor, zero: Tensor
) -> None:
    """Refuse planes of values that do not belong together, by name."""
    _check_codes("value", base, refinement)
    groups = value_groups(2 * base.shape[3])
    _check_scales("value", scale, zero, (*base.shape[:3], groups))


def _check_codes(name: str, base: Tensor, refinement: Tensor | None) -> None:
    shape = tuple(base.shape)
    if len(shape) != 4 or base.dtype != torch.uint8 or shape[2] == 0 or shape[2] % GROUP:
        raise ValueError(
            f"{name} base must be uint8 [B, H_kv, S, D / 2] with S a multiple of {GROUP}, "
            f"got {base.dtype} of shape {shape}"
        )
    if refinement is not None and (refinement.shape, refinement.dtype) != (base.shape, base.dtype):
        raise ValueError(
            f"{name} refinement must be uint8 of shape {shape}, "
            f"got {refinement.dtype} of shape {tuple(refinement.shape)}"
        )


def _check_scales(name: str, scale: Tensor, zero: Tensor, shape: tuple[int, ...]) -> None:
    for part, tensor in (("scale", scale), ("zero", zero)):
        if tuple(tensor.shape) != shape or tensor.dtype != SCALE_DTYPE:
            raise ValueError(
                f"{name} {part} must be {SCALE_DTYPE} of shape {shape}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )


def _quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes int8 of float32 groups ``[..., g]``, and their scales and zero points ``[...]``."""
    size = x.shape[-1]
    smallest = x.amin(-1, keepdim=True)
    scale = weights.divide(x.amax(-1, keepdim=True) - smallest, LEVELS)
    zero = smallest + MIDDLE * scale
    centered = x - zero
    base = weights.round_to_base(centered, scale, size)
    refinement, _ = weights.refine(centered, base, scale, size, OVERLAP)
    return base, refinement, scale.squeeze(-1), zero.squeeze(-1)


def _pack(base: Tensor, refinement: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Planes of codes ``[..., D]``: byte j of a token holds channels j and j + D / 2."""
    return weights.pack_base(base, head_dim), weights.pack_refinement(refinement, head_dim)


def _write_group(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]],
    buffer: Tensor,
    group: Tensor,
    *planes: Tensor,
) -> None:
    batch, heads, capacity, half = planes[0].shape
    slots = buffer.shape[2] if buffer.dim() == 4 else 0
    if tuple(buffer.shape) != (batch, heads, slots, 2 * half) or slots < GROUP:
        raise ValueError(
            f"buffer must be [B, H_kv, R, D] with R >= {GROUP} for a base plane "
            f"{tuple(planes[0].shape)} [B, H_kv, S, D / 2], got {tuple(buffer.shape)}"
        )
    if tuple(group.shape) != (batch,) or group.dtype != torch.int64:
        raise ValueError(
            f"group must be int64 of shape {(batch,)}, got {group.dtype} of {tuple(group.shape)}"
        )
    groups = capacity // GROUP
    if group.device.type == "cpu" and group.numel() and group.max() >= groups:
        raise ValueError(f"group must be below the cache's {groups}, got {group.max().item()}")
    first = group.clamp(min=0)[:, None] * GROUP
    token = first + torch.arange(GROUP, device=group.device)
    slot = (token % slots)[:, None, :, None].expand(batch, heads, GROUP, 2 * half)
    written = (group >= 0)[:, None, None, None]
    for plane, new in zip(planes, quantize(buffer.gather(2, slot)), strict=True):
        # Scales of keys have one entry a group, all others one a token.
        entry = token if new.shape[2] == GROUP else first // GROUP
        index = entry[:, None, :, None].expand_as(new)
        plane.scatter_(2, index, torch.where(written, new, plane.gather(2, index)))
