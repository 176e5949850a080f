"""Attention over QuantSpec's hierarchical KV cache, exact where the order of a sum could show.

As in ``nestq.reference.attention``, a row of the result has the same bits whatever the other rows
of the call, the batch and the sizes of cache and buffer are: matrix products run on integers held
in float64, whose sums below 2^53 are exact in any order, and a masked key contributes exactly 0.
Scales of keys vary along the sum over channels, so they go into the query before it is rounded.
Full-precision keys and values are integers of 28 bits, in two digits that are multiplied apart.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestq.reference.kv import check_positions
from nestq.reference.kv_quantspec import (
    GROUP,
    OVERLAP,
    check_key_planes,
    check_value_planes,
    composed_codes,
    first_recent,
)
from nestq.reference.pointwise import same_bits_anywhere

MAX_HEAD_DIM = 512
# Keys whose weights are summed exactly; the blocks' sums are added in order.
KEY_BLOCK = 1024
# |query code| <= 2^36, |key code| <= 2^7, up to 2^9 terms: sums stay below 2^53.
QUERY_STEPS = 1 << 36
# |weight code| <= 2^35, |value code| <= 2^7, 2^10 terms a block: sums stay below 2^53.
WEIGHT_STEPS = 1 << 35
# Of a sum of up to 2^10 numbers without codes.
SUM_STEPS = 1 << 43
# A recent number has two digits of up to 2^14; |query code| <= 2^30, up to 2^9 terms, and
# |weight code| <= 2^30, 2 G terms that are not 0: sums stay at or below 2^53.
DIGIT = 1 << 14
RECENT_STEPS = 1 << 27
RECENT_FACTOR_STEPS = 1 << 30
# Queries are taken in pieces of about this many scores, to bound the memory of a long prompt.
SCORES_A_PIECE = 1 << 22


def quantspec_attention(
    query: Tensor,
    positions: Tensor,
    key_base: Tensor,
    key_refinement: Tensor | None,
    key_scale: Tensor,
    key_zero: Tensor,
    value_base: Tensor,
    value_refinement: Tensor | None,
    value_scale: Tensor,
    value_zero: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
    scaling: float,
    sliding_window: int,
) -> Tensor:
    """Softmax attention of queries at given positions over planes and a full-precision buffer.

    The query at position p sees tokens ``j <= p`` and, with a sliding window,
    ``j > p - sliding_window``. It reads those with ``j >= first_recent(p)`` from the buffer, in
    slot ``j % R``, and older ones from the planes.

    Args:
        query: ``[B, H, n, D]``; head h reads the cache's head ``h // (H / H_kv)``.
        positions: int64 ``[B, n]``; negative for a pad, whose result is zero.
        key_base: uint8 ``[B, H_kv, S, D / 2]``, S a multiple of 128.
        key_refinement: the same, or None to read the base only (the draft).
        key_scale: float32 ``[B, H_kv, S / 128, D]``.
        key_zero: the same.
        value_base: as for keys.
        value_refinement: as for keys; None for both or for neither.
        value_scale: float32 ``[B, H_kv, S, V]``, V of ``value_groups(D)``.
        value_zero: the same.
        recent_keys: ``[B, H_kv, R, D]``; R holds what all queries of a row read.
        recent_values: the same.
        scaling: factor of the scores, usually ``D ** -0.5``.
        sliding_window: tokens that a query sees, itself included; 0 for all.

    Returns:
        ``[B, H, n, D]`` in the dtype of the query.

    Raises:
        ValueError: shapes do not fit, D is above 512 or, on a CPU, the queries of a row read more
            tokens than R or a quantized group beyond S.
    """
    check_key_planes(key_base, key_refinement, key_scale, key_zero)
    check_value_planes(value_base, value_refinement, value_scale, value_zero)
    if (key_refinement is None) != (value_refinement is None):
        raise ValueError("key_refinement and value_refinement must both be given or both be None")
    check_call(query, positions, key_base, value_base, recent_keys, recent_values)
    batch, heads, _, head_dim = query.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"query must have a head size up to {MAX_HEAD_DIM}, got {head_dim}")
    kv_heads, capacity = key_base.shape[1:3]
    if query.numel() == 0:
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    used = _used_slots(positions, capacity)
    groups = used // GROUP
    keys = _Planes(
        _codes(key_base, key_refinement, used).unflatten(2, (groups, GROUP)),
        key_scale[:, :, :groups].double(),
        key_zero[:, :, :groups].double(),
    )
    values = _Planes(
        _codes(value_base, value_refinement, used),
        value_scale[:, :, :used].double().mT.unsqueeze(3),
        value_zero[:, :, :used].double().mT.unsqueeze(3),
    )
    recent = _recent(recent_keys), _recent(recent_values)
    rows = query.double().reshape(batch, kv_heads, -1, head_dim)
    row_positions = positions.repeat(1, heads // kv_heads)[:, None, :, None]
    piece = max(1, SCORES_A_PIECE // (batch * kv_heads * (used + recent_keys.shape[2])))
    pieces = zip(rows.split(piece, 2), row_positions.split(piece, 2), strict=True)
    out = [_attend(*piece, keys, values, *recent, scaling, sliding_window) for piece in pieces]
    return torch.cat(out, dim=2).reshape(query.shape).to(query.dtype)


def check_call(
    query: Tensor,
    positions: Tensor,
    key_base: Tensor,
    value_base: Tensor,
    recent_keys: Tensor,
    recent_values: Tensor,
) -> None:
    """Refuse queries, positions and buffers that do not fit the planes, by name."""
    kv_batch, kv_heads, capacity, half = key_base.shape
    if value_base.shape != key_base.shape:
        raise ValueError(
            f"value_base must have the shape of key_base, {tuple(key_base.shape)}, "
            f"got {tuple(value_base.shape)}"
        )
    if (
        query.dim() != 4
        or (query.shape[0], query.shape[3]) != (kv_batch, 2 * half)
        or query.shape[1] % kv_heads
    ):
        raise ValueError(
            f"query must be [B, H, n, D] for key_base {tuple(key_base.shape)} "
            f"[B, H_kv, S, D / 2] with H a multiple of H_kv, got {tuple(query.shape)}"
        )
    slots = recent_keys.shape[2] if recent_keys.dim() == 4 else 0
    expected = kv_batch, kv_heads, slots, 2 * half
    for name, buffer in (("recent_keys", recent_keys), ("recent_values", recent_values)):
        if tuple(buffer.shape) != expected or slots == 0 or not buffer.is_floating_point():
            raise ValueError(
                f"{name} must be a floating point {expected} [B, H_kv, R, D], "
                f"got {buffer.dtype} of shape {tuple(buffer.shape)}"
            )
    # What is not quantized yet may lie beyond the planes.
    check_positions(positions, kv_batch, query.shape[2], capacity + 2 * GROUP)
    if positions.device.type != "cpu" or positions.numel() == 0:
        return
    last = positions.amax(1)
    earliest = torch.where(positions < 0, last[:, None], positions).amin(1)
    needed = int((last + 1 - first_recent(earliest).clamp(min=0)).max())
    if needed > slots:
        raise ValueError(
            f"recent_keys must have as many slots as the queries of a row read, {needed}, "
            f"got {slots}"
        )


class _Planes(NamedTuple):
    """Unpacked keys or values."""

    codes: Tensor
    """Integers in float64, steps of s / 16: keys ``[B, H_kv, C, G, D]``, values ``[.., T, D]``."""
    scale: Tensor
    """s in float64: keys ``[B, H_kv, C, D]``, values ``[B, H_kv, V, 1, T]``."""
    zero: Tensor
    """The same."""


class _Recent(NamedTuple):
    """Full-precision keys or values of the buffer as ``(DIGIT * high + low) * largest / steps``."""

    high: Tensor
    """Integers in float64, ``[B, H_kv, R, D]``."""
    low: Tensor
    largest: Tensor
    """``[B, H_kv, 1, R]``; NaN where a number is not finite, whose digits are then 0."""


def _attend(
    query: Tensor,
    position: Tensor,
    keys: _Planes,
    values: _Planes,
    recent_keys: _Recent,
    recent_values: _Recent,
    scaling: float,
    sliding_window: int,
) -> Tensor:
    """Attention of float64 rows ``[B, H_kv, R, D]`` at positions ``[B, 1, R, 1]``."""
    first = first_recent(position)
    token = torch.arange(keys.codes.shape[2] * GROUP, device=position.device)
    old = token < first
    slots = recent_keys.high.shape[2]
    distance = (position - torch.arange(slots, device=position.device)) % slots
    recent = (position - distance >= first) & (position >= distance)
    if sliding_window > 0:
        old &= position - token < sliding_window
        recent &= distance < sliding_window

    old_scores = _old_scores(query, keys).mul_(scaling).masked_fill_(~old, -torch.inf)
    recent_scores = _recent_scores(query, recent_keys).mul_(scaling)
    recent_scores.masked_fill_(~recent, -torch.inf)
    peak = torch.maximum(old_scores.amax(-1, keepdim=True), recent_scores.amax(-1, keepdim=True))
    peak = peak.masked_fill(peak == -torch.inf, 0)
    old_weights = same_bits_anywhere(torch.exp, old_scores - peak)
    recent_weights = same_bits_anywhere(torch.exp, recent_scores - peak)

    total = (recent_weights * WEIGHT_STEPS).round_().sum(-1, keepdim=True)
    for block in (old_weights * WEIGHT_STEPS).round_().split(KEY_BLOCK, -1):
        total += block.sum(-1, keepdim=True)
    sums = _old_sums(old_weights, old, values) + _recent_sums(recent_weights, recent, recent_values)
    return sums / (_divisor(total) / WEIGHT_STEPS)


def _old_scores(query: Tensor, keys: _Planes) -> Tensor:
    """Products ``[B, H_kv, R, C * G]`` of queries and quantized keys."""
    rows = query.unsqueeze(2)  # a group at a time: [B, H_kv, C, R, D]
    codes, step = _steps(rows * keys.scale.unsqueeze(3), QUERY_STEPS)
    scores = (codes @ keys.codes.mT).mul_(step / OVERLAP)
    codes, step = _steps(rows * keys.zero.unsqueeze(3), SUM_STEPS)
    scores += codes.sum(-1, keepdim=True) * step
    return scores.transpose(2, 3).flatten(-2)


def _recent_scores(query: Tensor, keys: _Recent) -> Tensor:
    """Products ``[B, H_kv, R, slots]`` of queries and full-precision keys."""
    codes, step = _steps(query, RECENT_FACTOR_STEPS)
    scores = (codes @ keys.high.mT).mul_(DIGIT) + codes @ keys.low.mT
    return scores.mul_(step / RECENT_STEPS).mul_(keys.largest)


def _old_sums(weights: Tensor, visible: Tensor, values: _Planes) -> Tensor:
    """Weighted sums ``[B, H_kv, R, D]`` of quantized values."""
    head_dim = values.codes.shape[-1]
    groups = values.scale.shape[2]
    parts = []
    for i, channels in enumerate(values.codes.split(head_dim // groups, -1)):
        # Scales and zero points vary along the sum: they go into the weight before it is rounded.
        scaled = (weights * values.scale[:, :, i]).masked_fill_(~visible, 0)
        scaled_codes, step = _steps(scaled, WEIGHT_STEPS)
        shifted = (weights * values.zero[:, :, i]).masked_fill_(~visible, 0)
        shifted_codes, shifted_step = _steps(shifted, SUM_STEPS)
        sums = weights.new_zeros((*weights.shape[:3], channels.shape[-1]))
        zeros = torch.zeros_like(step)
        for start in range(0, weights.shape[-1], KEY_BLOCK):
            block = slice(start, start + KEY_BLOCK)
            sums += scaled_codes[..., block] @ channels[..., block, :]
            zeros += shifted_codes[..., block].sum(-1, keepdim=True)
        parts.append(sums * (step / OVERLAP) + zeros * shifted_step)
    return torch.cat(parts, -1)


def _recent_sums(weights: Tensor, visible: Tensor, values: _Recent) -> Tensor:
    """Weighted sums ``[B, H_kv, R, D]`` of full-precision values."""
    scaled = (weights * values.largest).masked_fill_(~visible, 0)
    codes, step = _steps(scaled, RECENT_FACTOR_STEPS)
    sums = (codes @ values.high).mul_(DIGIT) + codes @ values.low
    return sums.mul_(step / RECENT_STEPS)


def _steps(x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Integers up to ``steps`` for x ``[..., N]``, and what one of them is, ``[..., 1]``."""
    largest = x.abs().amax(-1, keepdim=True)
    return (x / _divisor(largest)).mul_(steps).round_(), largest / steps


def _recent(states: Tensor) -> _Recent:
    states = states.double()
    codes, step = _steps(states, RECENT_STEPS)
    # Digits of what nobody sees must be numbers, for 0 times them to be 0.
    codes = codes.nan_to_num_(nan=0.0)
    high = (codes / DIGIT).round_()
    largest = (step * RECENT_STEPS).mT
    return _Recent(high, codes - high * DIGIT, largest)


def _used_slots(positions: Tensor, capacity: int) -> int:
    """Slots of planes that some query may see; on a GPU all, so as not to wait for the device."""
    if positions.device.type != "cpu":
        return capacity
    return max(int(first_recent(positions.max())), GROUP)


def _codes(base: Tensor, refinement: Tensor | None, used: int) -> Tensor:
    fine = None if refinement is None else refinement[:, :, :used]
    return composed_codes(base[:, :, :used], fine).double()


def _divisor(x: Tensor) -> Tensor:
    """x, or 1 where it is 0."""
    return x.masked_fill(x == 0, 1)
