"""A forward pass over QuantSpec's cache: new keys and values are kept, then attended from.

New tokens go into the full-precision buffers. The pass that has the token at ``(c + 2) G``
quantizes group c, which that token is the first to read quantized, from the buffers into the
planes. Nothing is remembered: a pass that has that token again writes the same bytes again. So what
a token reads is a function of its position alone, and so is what the cache holds after it.

Only verified tokens are quantized, although nobody says which are: group c ends G tokens before the
token at ``(c + 2) G``, and rounds draft fewer. A rejected token is overwritten in its slot long
before its group is due (QuantSpec paper, 4.3).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nestq.reference.kv import check_positions
from nestq.reference.kv_quantspec import (
    GROUP,
    check_key_planes,
    check_value_planes,
    write_key_group,
    write_recent,
    write_value_group,
)

# Slots of a buffer: the paper's two halves of G, and as many again for the tokens of a pass. The
# kernel of attention reads buffers in pieces of 2 G.
SLOTS = 4 * GROUP


def longest_piece(slots: int) -> int:
    """Tokens that may be written at once, so that the first of them still finds all that it reads.

    A group that is due at the first token begins 2 G tokens before it.
    """
    return slots - 2 * GROUP


def due_groups(positions: Tensor) -> Tensor:
    """Groups that tokens are the first to read quantized, -1 for none.

    Args:
        positions: int64 ``[B, n]``, consecutive.

    Returns:
        int64 ``[B, ceil(n / G)]``.
    """
    count = positions.shape[1]
    last = positions[:, -1:]
    back = torch.arange(-(-count // GROUP), device=positions.device)
    boundary = torch.div(last, GROUP, rounding_mode="floor") - back
    group = boundary - 2
    return torch.where((boundary * GROUP > last - count) & (group >= 0), group, -1)


def quantspec_append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    recent_keys: Tensor,
    key_base: Tensor,
    key_refinement: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    recent_values: Tensor,
    value_base: Tensor,
    value_refinement: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
) -> None:
    """Write keys and values into the buffers, and quantize the groups that are due, in place.

    Nothing waits for the device, so the writes can be captured in a CUDA graph.

    Args:
        keys: ``[B, H_kv, n, D]``, n at most ``longest_piece(R)``.
        values: the same.
        positions: int64 ``[B, n]``, consecutive; negative for pads, on the left.
        recent_keys: ``[B, H_kv, R, D]`` in the dtype in which keys are kept; slot ``j % R`` has
            token j.
        key_base: uint8 ``[B, H_kv, S, D / 2]``, S a multiple of G.
        key_refinement: the same.
        key_scale: float32 ``[B, H_kv, S / G, D]``.
        key_zero: the same.
        recent_values: as for keys.
        value_base: as for keys.
        value_refinement: as for keys.
        value_scale: float32 ``[B, H_kv, S, V]``, V of ``value_groups(D)``.
        value_zero: the same.

    Raises:
        ValueError: a shape or dtype does not fit or, on a CPU, positions are not consecutive or not
            below S + 2 G.
    """
    check_append(keys, values, positions, recent_keys, recent_values, key_base, value_base)
    if keys.shape[2] == 0:
        return
    write_recent(keys, positions, recent_keys)
    write_recent(values, positions, recent_values)
    for group in due_groups(positions).unbind(1):
        if group.device.type == "cpu" and (group < 0).all():
            check_key_planes(key_base, key_refinement, key_scale, key_zero)
            check_value_planes(value_base, value_refinement, value_scale, value_zero)
            continue
        write_key_group(recent_keys, group, key_base, key_refinement, key_scale, key_zero)
        write_value_group(
            recent_values, group, value_base, value_refinement, value_scale, value_zero
        )


def check_append(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    key_base: Tensor,
    value_base: Tensor,
) -> None:
    """Refuse new keys and values that do not fit buffers and planes, by name."""
    if key_base.dim() != 4 or value_base.shape != key_base.shape:
        raise ValueError(
            "key_base and value_base must have one shape [B, H_kv, S, D / 2], "
            f"got {tuple(key_base.shape)} and {tuple(value_base.shape)}"
        )
    batch, heads, capacity, half = key_base.shape
    count = keys.shape[2] if keys.dim() == 4 else 0
    for name, states in (("keys", keys), ("values", values)):
        if tuple(states.shape) != (batch, heads, count, 2 * half):
            raise ValueError(
                f"{name} must be [B, H_kv, n, D] for planes {tuple(key_base.shape)} "
                f"[B, H_kv, S, D / 2], got {tuple(states.shape)}"
            )
    slots = recent_keys.shape[2] if recent_keys.dim() == 4 else 0
    if count > longest_piece(slots):
        raise ValueError(
            f"recent_keys must be [B, H_kv, R, D] with R at least {count + 2 * GROUP} for {count} "
            f"tokens, got {tuple(recent_keys.shape)}"
        )
    if recent_values.shape != recent_keys.shape or recent_values.dtype != recent_keys.dtype:
        raise ValueError(
            f"recent_values must be {recent_keys.dtype} of shape {tuple(recent_keys.shape)}, as "
            f"recent_keys is, got {recent_values.dtype} of shape {tuple(recent_values.shape)}"
        )
    # What is not quantized yet may lie beyond the planes.
    check_positions(positions, batch, count, capacity + 2 * GROUP)
    if positions.device.type == "cpu" and count:
        expected = positions[:, -1:] - torch.arange(count - 1, -1, -1)
        wrong = (positions.clamp(min=-1) != expected.clamp(min=-1)).any(1).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                "positions must be consecutive, with pads (negative) on the left only, "
                f"got {positions[row].tolist()} in row {row}"
            )


def append_and_attend(
    append: Callable[..., None],
    attend: Callable[..., Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    recent_keys: Tensor,
    key_base: Tensor,
    key_refinement: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    recent_values: Tensor,
    value_base: Tensor,
    value_refinement: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
    refinement: bool,
    scaling: float,
    sliding_window: int,
) -> Tensor:
    """A forward pass of one layer over the cache: piece by piece, tokens are written, then attend.

    Args:
        append: :func:`quantspec_append`, or a kernel of it.
        attend: ``attention_quantspec.quantspec_attention``, or a kernel of it.
        query: ``[B, H, n, D]``; head h reads the cache's head ``h // (H / H_kv)``. Here n may be
            any number.
        keys: ``[B, H_kv, n, D]``.
        values: the same.
        positions: int64 ``[B, n]``, of queries, keys and values; as in :func:`quantspec_append`,
            and so are all that follow.
        recent_keys: ``[B, H_kv, R, D]``.
        key_base: uint8 ``[B, H_kv, S, D / 2]``.
        key_refinement: the same.
        key_scale: float32 ``[B, H_kv, S / G, D]``.
        key_zero: the same.
        recent_values: as for keys.
        value_base: as for keys.
        value_refinement: as for keys.
        value_scale: float32 ``[B, H_kv, S, V]``.
        value_zero: the same.
        refinement: whether attention reads the lower nibbles too.
        scaling: factor of the scores, usually ``D ** -0.5``.
        sliding_window: tokens that a query sees, itself included; 0 for all.

    Returns:
        ``[B, H, n, D]`` in the dtype of the query; the heads of a query lie together in memory.
    """
    cached_keys = recent_keys, key_base, key_refinement, key_scale, key_zero
    cached_values = recent_values, value_base, value_refinement, value_scale, value_zero
    fine = (key_refinement, value_refinement) if refinement else (None, None)
    read = (
        *(key_base, fine[0], key_scale, key_zero),
        *(value_base, fine[1], value_scale, value_zero),
        *(recent_keys, recent_values),
    )
    pieces = []
    step = max(longest_piece(recent_keys.shape[2]), 1)
    for start in range(0, query.shape[2], step):
        piece = slice(start, start + step)
        at = positions[:, piece].contiguous()
        append(keys[:, :, piece], values[:, :, piece], at, *cached_keys, *cached_values)
        out = attend(query[:, :, piece], at, *read, scaling, sliding_window)
        pieces.append(out.transpose(1, 2))
    if not pieces:
        return query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return whole.contiguous().transpose(1, 2)
