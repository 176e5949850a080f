"""A KV cache of 16-bit numbers: writing, and attention. What a nested cache is compared with.

The steps are those of ``nestq.reference.attention``, so that a row of the result has the same bits
whatever the other rows of the call are: products run on integers held in float64, whose sums below
2^53 are exact in any order. Each vector of keys or values is rounded to multiples of 2^-21 of the
power of two above its largest element, far below what 16 bits hold.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestq.reference.attention import visible_slots
from nestq.reference.kv import check_positions, write_at
from nestq.reference.pointwise import same_bits_anywhere

MAX_HEAD_DIM = 512
KEY_BLOCK = 1024
# |query code| <= 2^22, |key code| <= 2^21, up to 2^9 terms: sums stay below 2^53.
QUERY_STEPS = 1 << 22
CACHE_STEPS = 1 << 21
# |weight code| <= 2^21, |value code| <= 2^21, 2^10 terms a block: the same.
WEIGHT_STEPS = 1 << 21


def append_16(
    keys: Tensor, values: Tensor, positions: Tensor, key_cache: Tensor, value_cache: Tensor
) -> None:
    """Write keys and values into the cache at their positions, in place, rounded to its dtype.

    Args:
        keys: ``[B, H_kv, n, D]``.
        values: the same.
        positions: int64 ``[B, n]``, as in :func:`nestq.reference.kv.kv_append`: nothing is written
            for a negative one (a pad).
        key_cache: ``[B, H_kv, S, D]``.
        value_cache: the same.

    Raises:
        ValueError: a shape does not fit or, on a CPU, a position is not below S.
    """
    check_append(keys, values, positions, key_cache, value_cache)
    if keys.numel():
        dtype = key_cache.dtype
        write_at((key_cache, value_cache), (keys.to(dtype), values.to(dtype)), positions)


def check_append(
    keys: Tensor, values: Tensor, positions: Tensor, key_cache: Tensor, value_cache: Tensor
) -> None:
    """Refuse what does not fit a cache, by name."""
    if value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"value_cache must be {key_cache.dtype} of shape {tuple(key_cache.shape)}, as "
            f"key_cache is, got {value_cache.dtype} of shape {tuple(value_cache.shape)}"
        )
    batch, heads, capacity, head_dim = key_cache.shape
    for name, states in (("keys", keys), ("values", values)):
        shape = tuple(states.shape)
        if len(shape) != 4 or (*shape[:2], shape[3]) != (batch, heads, head_dim):
            raise ValueError(
                f"{name} must be [B, H_kv, n, D] for a cache {tuple(key_cache.shape)} "
                f"[B, H_kv, S, D], got {shape}"
            )
    if values.shape != keys.shape:
        raise ValueError(
            f"values must have the shape of keys, {tuple(keys.shape)}, got {tuple(values.shape)}"
        )
    check_positions(positions, batch, keys.shape[2], capacity)


def attention_16(
    query: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    sliding_window: int,
    sink: int = 0,
    local: int = 0,
) -> Tensor:
    """Softmax attention of queries at given positions over cached keys and values.

    The key in slot j is visible to the query at position p when ``j <= p`` and, with a sliding
    window, ``j > p - sliding_window`` and, of a sparse draft, ``j < sink`` or ``j > p - local``.

    Args:
        query: ``[B, H, n, D]``; head h reads the cache's head ``h // (H / H_kv)``. It is rounded to
            the dtype of the keys.
        positions: int64 ``[B, n]``; negative for a pad, whose result is zero.
        keys: ``[B, H_kv, S, D]``.
        values: the same.
        scaling: factor of the scores, usually ``D ** -0.5``.
        sliding_window: keys that a query sees, itself included; 0 for all.
        sink: with ``local``, keys at the beginning that a query sees nevertheless.
        local: keys that a query sees, itself included, besides the sink; 0 for all.

    Returns:
        ``[B, H, n, D]`` in the dtype of the query; the heads of a query lie together in memory.

    Raises:
        ValueError: shapes do not fit, D is above 512 or, on a CPU, a position is not below S.
    """
    _check(query, positions, keys, values)
    batch, heads, _, head_dim = query.shape
    kv_heads, used = keys.shape[1:3]
    if query.numel() == 0:
        return query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    if positions.device.type == "cpu":  # on a GPU all slots, so as not to wait for the device
        used = max(int(positions.max()) + 1, 1)
    rows = query.to(keys.dtype).double().reshape(batch, kv_heads, -1, head_dim)
    row_positions = positions.repeat(1, heads // kv_heads)[:, None, :, None]
    key_entries, value_entries = (_in_fixed_point(x[:, :, :used]) for x in (keys, values))
    rest = scaling, sliding_window, sink, local
    out = _attend(rows, row_positions, key_entries, value_entries, *rest)
    result = out.reshape(query.shape).transpose(1, 2).to(query.dtype)
    return result.contiguous().transpose(1, 2)


def _check(query: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    if keys.dim() != 4 or values.shape != keys.shape:
        raise ValueError(
            "keys and values must both be [B, H_kv, S, D], "
            f"got shapes {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    batch, kv_heads, capacity, head_dim = keys.shape
    shape = tuple(query.shape)
    if len(shape) != 4 or (shape[0], shape[3]) != (batch, head_dim) or shape[1] % kv_heads:
        raise ValueError(
            f"query must be [B, H, n, D] for keys {tuple(keys.shape)} [B, H_kv, S, D] with H a "
            f"multiple of H_kv, got {shape}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"query must have a head size up to {MAX_HEAD_DIM}, got {head_dim}")
    check_positions(positions, batch, shape[2], capacity)


class _Entries(NamedTuple):
    """Keys or values in fixed point."""

    codes: Tensor
    """Integers in float64, ``[B, H_kv, used, D]``."""
    step: Tensor
    """Powers of two in float64, ``[B, H_kv, 1, used]``."""


def _in_fixed_point(states: Tensor) -> _Entries:
    states = states.double()
    exponent = torch.frexp(states.abs().amax(-1, keepdim=True)).exponent
    step = torch.ldexp(torch.full_like(states[..., :1], 1 / CACHE_STEPS), exponent)
    return _Entries((states / step).round_(), step.mT)


def _attend(
    query: Tensor,
    position: Tensor,
    keys: _Entries,
    values: _Entries,
    scaling: float,
    sliding_window: int,
    sink: int,
    local: int,
) -> Tensor:
    """Attention of float64 rows ``[B, H_kv, R, D]`` at positions ``[B, 1, R, 1]``."""
    slots = torch.arange(keys.step.shape[-1], device=position.device)
    visible = visible_slots(position - slots, slots, sliding_window, sink, local)

    largest_query = query.abs().amax(-1, keepdim=True)
    query_codes = (query / _divisor(largest_query)).mul_(QUERY_STEPS).round_()
    scores = (query_codes @ keys.codes.mT).mul_(largest_query * (scaling / QUERY_STEPS))
    scores.mul_(keys.step).masked_fill_(~visible, -torch.inf)

    peak = scores.amax(-1, keepdim=True)
    weights = same_bits_anywhere(torch.exp, scores - peak.masked_fill(peak == -torch.inf, 0))
    weight_codes = (weights * WEIGHT_STEPS).round_()
    # The value's step varies along the sum, so it goes into the weight before that is rounded.
    scaled = weights.mul_(values.step).masked_fill_(~visible, 0)
    largest = scaled.amax(-1, keepdim=True)
    scaled_codes = scaled.div_(_divisor(largest)).mul_(WEIGHT_STEPS).round_()

    total = torch.zeros_like(largest)
    sums = torch.zeros_like(query)
    for start in range(0, scores.shape[-1], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        total += weight_codes[..., block].sum(-1, keepdim=True)
        sums += scaled_codes[..., block] @ values.codes[..., block, :]
    return sums / _divisor(total) * largest


def _divisor(x: Tensor) -> Tensor:
    """x, or 1 where it is 0."""
    return x.masked_fill(x == 0, 1)
