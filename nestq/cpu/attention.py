"""Attention over a nested KV cache by the C++ of this folder: few tokens at a time."""

import ctypes

import torch
from torch import Tensor

from nestq.cpu.library import address, threads_for
from nestq.reference.attention import SCORES_A_PIECE, check_attention, used_slots
from nestq.reference.pointwise import same_bits_anywhere

# For more, matrix products are as fast.
MAX_TOKENS = 16


def can_compute(query: Tensor, *planes: Tensor | None) -> bool:
    """Whether :func:`nested_attention` takes such arguments: base, refinement, scale, twice."""
    key_base, value_base = planes[0], planes[3]
    assert key_base is not None
    assert value_base is not None
    few = 0 < query.shape[2] <= MAX_TOKENS and query.numel() > 0
    scores = query.shape[:3].numel() * key_base.shape[2]
    in_order = all(plane is None or plane.is_contiguous() for plane in planes)
    return few and scores <= SCORES_A_PIECE and in_order and key_base.shape == value_base.shape


def nested_attention(
    library: ctypes.CDLL,
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
    """What :func:`nestq.reference.attention.nested_attention` computes, bit for bit.

    Args:
        library: of :func:`nestq.cpu.library.library`.
        query: as there, and so are the others; planes are contiguous.
        positions: as there.
        key_base: as there.
        key_refinement: as there.
        key_scale: as there.
        value_base: as there.
        value_refinement: as there.
        value_scale: as there.
        scaling: as there.
        sliding_window: as there.
        recent: as there.
        sink: as there.
        local: as there.

    Raises:
        ValueError: shapes do not fit, D is above 512, or a position is not below S.
    """
    keys = (key_base, key_refinement, key_scale)
    values = (value_base, value_refinement, value_scale)
    check_attention(query, positions, keys, values)
    batch, _, tokens, head_dim = query.shape
    kv_heads, capacity = key_base.shape[1:3]
    used = used_slots(positions, capacity)
    rows = query.double().reshape(batch, kv_heads, -1, head_dim).contiguous()
    positions = positions.contiguous()
    sizes = (batch, kv_heads, rows.shape[2], tokens, head_dim, capacity, used)
    shape = (*sizes, sliding_window, recent, sink, local)
    threads = threads_for(rows.numel() * used)
    scores = torch.empty(*rows.shape[:3], used, dtype=torch.float64)
    library.nestq_attention_scores(
        *shape, *map(address, (positions, *keys, rows)), scaling, address(scores), threads
    )
    # PyTorch's, so that its bits are those of the reference.
    weights = same_bits_anywhere(torch.exp, scores)
    out = torch.empty_like(rows)
    library.nestq_attention_sums(*shape, *map(address, (positions, *values, weights, out)), threads)
    result = out.view(query.shape).transpose(1, 2)
    return result.to(query.dtype).contiguous().transpose(1, 2)
