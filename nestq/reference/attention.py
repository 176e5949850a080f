"""Attention over a nested KV cache, exact where the order of a sum could show.

A row of the result has the same bits whatever the other rows of the call, the batch and the
capacity of the cache are. Matrix products run on integers held in float64, whose sums below 2^53
are exact in any order; maxima have no order; the few sums that round run over blocks of keys at
fixed positions, in order, where a masked key contributes exactly 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestq.reference.kv import OVERLAP, check_planes, check_positions
from nestq.reference.pointwise import same_bits_anywhere
from nestq.reference.weights import unpack_base, unpack_refinement

MAX_HEAD_DIM = 512
# Keys whose weights are summed exactly; the blocks' sums are added in order.
KEY_BLOCK = 1024
# |query code| <= 2^36, |key code| <= 2^7, up to 2^9 terms: sums stay below 2^53.
QUERY_STEPS = 1 << 36
# |weight code| <= 2^35, |value code| <= 2^7, 2^10 terms a block: sums stay below 2^53.
WEIGHT_STEPS = 1 << 35
# Queries are taken in pieces of about this many scores, to bound the memory of a long prompt.
SCORES_A_PIECE = 1 << 22

# Base, refinement or None, scale.
Planes = tuple[Tensor, Tensor | None, Tensor]


def nested_attention(
    query: Tensor,
    positions: Tensor,
    key_base: Tensor,
    key_refinement: Tensor | None,
    key_scale: Tensor,
    value_base: Tensor,
    value_refinement: Tensor | None,
    value_scale: Tensor,
    scaling: float,
    sliding_window: int,
    recent: int,
    sink: int = 0,
    local: int = 0,
) -> Tensor:
    """Softmax attention of queries at given positions over cached keys and values.

    The key in slot j is visible to the query at position p when ``j <= p`` and, with a sliding
    window, ``j > p - sliding_window`` and, of a sparse draft, ``j < sink`` or ``j > p - local``.

    Args:
        query: ``[B, H, n, D]``; head h reads the cache's head ``h // (H / H_kv)``.
        positions: int64 ``[B, n]``; negative for a pad, whose result is zero.
        key_base: uint8 ``[B, H_kv, S, D / 2]``.
        key_refinement: the same, or None to read the base only (KV4).
        key_scale: float32 ``[B, H_kv, S]``.
        value_base: as for keys.
        value_refinement: as for keys; None for both or for neither.
        value_scale: as for keys.
        scaling: factor of the scores, usually ``D ** -0.5``.
        sliding_window: keys that a query sees, itself included; 0 for all.
        recent: with a refinement, the query at p reads it only in the slots ``j > p - recent``
            (Recent-N, paper A.2) and the base elsewhere; 0 reads it in all slots.
        sink: with ``local``, keys at the beginning that a query sees nevertheless.
        local: keys that a query sees, itself included, besides the sink; 0 for all.

    Returns:
        ``[B, H, n, D]`` in the dtype of the query; the heads of a query lie together in memory.

    Raises:
        ValueError: shapes do not fit, D is above 512 or, on a CPU, a position is not below S.
    """
    keys, values = (
        (key_base, key_refinement, key_scale),
        (value_base, value_refinement, value_scale),
    )
    check_attention(query, positions, keys, values)
    batch, heads, _, head_dim = query.shape
    kv_heads, capacity = key_base.shape[1:3]
    if query.numel() == 0:
        return query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    used = used_slots(positions, capacity)
    key_entries, value_entries = (_unpack(*planes, used, recent) for planes in (keys, values))
    rows = query.double().reshape(batch, kv_heads, -1, head_dim)
    row_positions = positions.repeat(1, heads // kv_heads)[:, None, :, None]
    piece = max(1, SCORES_A_PIECE // (batch * kv_heads * used))
    pieces = zip(rows.split(piece, 2), row_positions.split(piece, 2), strict=True)
    entries = key_entries, value_entries
    out = [
        _attend(*piece, *entries, scaling, sliding_window, recent, sink, local) for piece in pieces
    ]
    result = torch.cat(out, dim=2).reshape(query.shape).transpose(1, 2)
    return result.to(query.dtype).contiguous().transpose(1, 2)


class _Entries(NamedTuple):
    """Unpacked keys or values."""

    codes: Tensor
    """Integers in float64, ``[B, H_kv, used, D]``, in steps of s / 16."""
    recent_codes: Tensor | None
    """What to add to the codes of recent slots."""
    scale: Tensor
    """s in float64, ``[B, H_kv, 1, used]``."""


def _attend(
    query: Tensor,
    position: Tensor,
    keys: _Entries,
    values: _Entries,
    scaling: float,
    sliding_window: int,
    recent: int,
    sink: int,
    local: int,
) -> Tensor:
    """Attention of float64 rows ``[B, H_kv, R, D]`` at positions ``[B, 1, R, 1]``."""
    slots = torch.arange(keys.scale.shape[-1], device=position.device)
    distance = position - slots
    visible = visible_slots(distance, slots, sliding_window, sink, local)
    old = distance >= recent

    largest_query = query.abs().amax(-1, keepdim=True)
    query_codes = (query / _divisor(largest_query)).mul_(QUERY_STEPS).round_()
    scores = query_codes @ keys.codes.mT
    if keys.recent_codes is not None:
        scores += (query_codes @ keys.recent_codes.mT).masked_fill(old, 0)
    scores *= largest_query * (scaling / (OVERLAP * QUERY_STEPS))
    scores.mul_(keys.scale).masked_fill_(~visible, -torch.inf)

    peak = scores.amax(-1, keepdim=True)
    weights = same_bits_anywhere(torch.exp, scores - peak.masked_fill(peak == -torch.inf, 0))
    weight_codes = (weights * WEIGHT_STEPS).round_()
    # The value's scale varies along the sum, so it goes into the weight before that is rounded.
    scaled = weights.mul_(values.scale).masked_fill_(~visible, 0)
    largest = scaled.amax(-1, keepdim=True)
    scaled_codes = scaled.div_(_divisor(largest)).mul_(WEIGHT_STEPS).round_()

    total = torch.zeros_like(largest)
    sums = torch.zeros_like(query)
    for start in range(0, scores.shape[-1], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        total += weight_codes[..., block].sum(-1, keepdim=True)
        block_sums = scaled_codes[..., block] @ values.codes[..., block, :]
        if values.recent_codes is not None:
            recent_only = scaled_codes[..., block].masked_fill(old[..., block], 0)
            block_sums += recent_only @ values.recent_codes[..., block, :]
        sums += block_sums
    return sums / _divisor(total) * (largest / OVERLAP)


def check_attention(query: Tensor, positions: Tensor, keys: Planes, values: Planes) -> None:
    """Refuse arguments of :func:`nested_attention` whose dtypes or shapes do not fit, by name."""
    check_planes("key", *keys)
    check_planes("value", *values)
    if (keys[1] is None) != (values[1] is None):
        raise ValueError("key_refinement and value_refinement must both be given or both be None")
    key_base = keys[0]
    batch, heads, count, head_dim = query.shape
    kv_batch, kv_heads, capacity, half = key_base.shape
    if (batch, head_dim) != (kv_batch, 2 * half) or heads % kv_heads:
        raise ValueError(
            f"query must be [B, H, n, D] for key_base {tuple(key_base.shape)} "
            f"[B, H_kv, S, D / 2] with H a multiple of H_kv, got {tuple(query.shape)}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"query must have a head size up to {MAX_HEAD_DIM}, got {head_dim}")
    check_positions(positions, batch, count, capacity)


def visible_slots(
    distance: Tensor, slots: Tensor, sliding_window: int, sink: int, local: int
) -> Tensor:
    """Which slots queries see, as in :func:`nested_attention`.

    Args:
        distance: int64 ``[..., S]``, the position of a query less the slot.
        slots: int64 ``[S]``.
        sliding_window: as there.
        sink: as there.
        local: as there.
    """
    visible = distance >= 0
    if sliding_window > 0:
        visible &= distance < sliding_window
    if local > 0:
        visible &= (distance < local) | (slots < sink)
    return visible


def used_slots(positions: Tensor, capacity: int) -> int:
    """Slots that some query may see; on a GPU all of them, so as not to wait for the device."""
    if positions.device.type != "cpu":
        return capacity
    return max(int(positions.max()) + 1, 1)


def _unpack(
    base: Tensor, refinement: Tensor | None, scale: Tensor, used: int, recent: int
) -> _Entries:
    head_dim = 2 * base.shape[-1]
    scale = scale[:, :, None, :used].double()
    codes = unpack_base(base[:, :, :used], head_dim) * OVERLAP
    if refinement is None:
        return _Entries(codes.double(), None, scale)
    fine = unpack_refinement(refinement[:, :, :used], head_dim)
    if recent:
        return _Entries(codes.double(), fine.double(), scale)
    return _Entries((codes + fine).double(), None, scale)


def _divisor(x: Tensor) -> Tensor:
    """x, or 1 where it is 0."""
    return x.masked_fill(x == 0, 1)
