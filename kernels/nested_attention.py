"""Attention over a nested KV cache, or over dense keys and values with the same arithmetic.

For a few queries the splits of the keys are shared out among programs, and a second kernel adds
them up in order. For many queries, or very many splits, one program takes all splits of its rows.
Either way a row has the same bits: see ``attention_split``.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nestq.kernels.arguments import check_programs
from nestq.kernels.attention_kernels import attention_kernel, combine_kernel
from nestq.kernels.attention_split import SPLIT
from nestq.kernels.kv_codes import BASE, BOTH, DENSE, RECENT
from nestq.reference.kv import check_planes, check_positions

MAX_HEAD_DIM = 256
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DENSE_DTYPES = (torch.float16, torch.bfloat16)
# Queries that share out splits; a longer call has work enough without.
FEW_QUERIES = 16
# Float32 numbers that a call may keep for its splits.
PARTIAL_SUMS = 1 << 26
# Columns of the result that a program adds up from all splits.
COMBINED_COLUMNS = 32
# Programs that a multiprocessor holds at a time: they use nearly all registers. Those of few rows
# that load nothing ahead can do with so many that there is room for a third.
RESIDENT = 2
FEW_ROWS = 8
FEW_ROWS_RESIDENT = 3
FEW_ROWS_REGISTERS = 168
# Splits of a program up to which it is not worth loading ahead.
FEW_SPLITS = 2


class AttentionConfig(NamedTuple):
    """How the work is divided: any choice gives the same bits."""

    rows: int
    """Rows of a program, from all query heads that share keys: 8, 16 or 32."""
    programs: int
    """Programs that share out the splits of such rows; 0 has one take them all."""


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
    config: AttentionConfig | None = None,
) -> Tensor:
    """Softmax attention over a nested cache, as ``nestq.reference.attention`` defines it.

    Nothing waits for the device: on a GPU a position beyond the capacity sees the whole cache.

    Args:
        query: float16, bfloat16 or float32 ``[B, H, n, D]``, contiguous along D; D is even and at
            most 256.
        positions: int64 ``[B, n]``, contiguous; negative for a pad, whose result is zero.
        key_base: uint8 ``[B, H_kv, S, D / 2]``; all planes and scales are contiguous.
        key_refinement: the same, or None to read the base only.
        key_scale: float32 ``[B, H_kv, S]``.
        value_base: as for keys.
        value_refinement: as for keys; None for both or for neither.
        value_scale: as for keys.
        scaling: factor of the scores.
        sliding_window: keys that a query sees, itself included; 0 for all.
        recent: with a refinement, the query at p reads it only in the slots ``j > p - recent``;
            0 reads it in all slots.
        sink: with ``local``, keys at the beginning that a query sees nevertheless.
        local: keys that a query sees, itself included, besides the sink; 0 for all. Splits that
            no query sees are not read.
        config: how the work is divided; None for what suits the shapes.

    Returns:
        ``[B, H, n, D]`` in the dtype of the query; the heads of a query lie together in memory.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    check_planes("key", key_base, key_refinement, key_scale)
    check_planes("value", value_base, value_refinement, value_scale)
    if (key_refinement is None) != (value_refinement is None):
        raise ValueError("key_refinement and value_refinement must both be given or both be None")
    planes = {
        "key_base": key_base,
        "key_refinement": key_refinement,
        "key_scale": key_scale,
        "value_base": value_base,
        "value_refinement": value_refinement,
        "value_scale": value_scale,
    }
    cache = {name: plane for name, plane in planes.items() if plane is not None}
    _check(query, positions, cache, 2 * key_base.shape[-1], "D / 2")
    key_fine = key_base if key_refinement is None else key_refinement
    value_fine = value_base if value_refinement is None else value_refinement
    return _attend(
        query,
        positions,
        (key_base.view(torch.int8), key_fine.view(torch.int8), key_scale),
        (value_base.view(torch.int8), value_fine.view(torch.int8), value_scale),
        scaling / 16,
        sliding_window,
        recent,
        sink,
        local,
        config,
        (BASE if key_refinement is None else RECENT if recent > 0 else BOTH).value,
    )


def attention_16(
    query: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    sliding_window: int,
    sink: int = 0,
    local: int = 0,
    config: AttentionConfig | None = None,
) -> Tensor:
    """The same attention over 16-bit keys and values, to compare with.

    Args:
        query: as for :func:`nested_attention`; it is rounded to the dtype of the keys.
        positions: as for :func:`nested_attention`.
        keys: float16 or bfloat16 ``[B, H_kv, S, D]``, contiguous.
        values: the same.
        scaling: factor of the scores.
        sliding_window: keys that a query sees, itself included; 0 for all.
        sink: with ``local``, keys at the beginning that a query sees nevertheless.
        local: keys that a query sees, itself included, besides the sink; 0 for all. Splits that
            no query sees are not read.
        config: how the work is divided; None for what suits the shapes.

    Returns:
        ``[B, H, n, D]`` in the dtype of the query; the heads of a query lie together in memory.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    if keys.dim() != 4 or keys.dtype not in DENSE_DTYPES:
        raise ValueError(
            "keys must be float16 or bfloat16 [B, H_kv, S, D], "
            f"got {keys.dtype} of shape {tuple(keys.shape)}"
        )
    if values.dtype != keys.dtype:
        raise ValueError(f"values must have the dtype of keys, {keys.dtype}, got {values.dtype}")
    _check(query, positions, {"keys": keys, "values": values}, keys.shape[-1], "D")
    unused = keys.new_empty(1, dtype=torch.float32)
    return _attend(
        query,
        positions,
        (keys, keys, unused),
        (values, values, unused),
        scaling,
        sliding_window,
        0,
        sink,
        local,
        config,
        DENSE.value,
    )


def _check(
    query: Tensor, positions: Tensor, cache: dict[str, Tensor], head_dim: int, last: str
) -> None:
    """Refuse what does not fit the first tensor of the cache, whose last dimension is named."""
    name, first = next(iter(cache.items()))
    batch, kv_heads, capacity, _ = first.shape
    if (
        query.dim() != 4
        or (query.shape[0], query.shape[3]) != (batch, head_dim)
        or query.shape[1] % kv_heads
    ):
        raise ValueError(
            f"query must be [B, H, n, D] for {name} {tuple(first.shape)} [B, H_kv, S, {last}] "
            f"with H a multiple of H_kv, got {tuple(query.shape)}"
        )
    if query.dtype not in QUERY_DTYPES or query.stride(-1) != 1:
        raise ValueError(
            "query must be float16, bfloat16 or float32 and contiguous along D, "
            f"got {query.dtype} with strides {query.stride()}"
        )
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"query must have an even head size of at most {MAX_HEAD_DIM}, got {head_dim}"
        )
    check_positions(positions, batch, query.shape[2], capacity)
    for other, tensor in cache.items():
        if tensor.dim() == 4 and tensor.shape != first.shape:
            raise ValueError(
                f"{other} must have the shape of {name}, {tuple(first.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
    for other, tensor in (cache | {"positions": positions}).items():
        if tensor.device != query.device:
            raise ValueError(
                f"{other} must be on the device of query, {query.device}, got {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{other} must be contiguous, got strides {tensor.stride()}")


def _default_config(query: Tensor, kv_heads: int, splits: int, read_splits: int) -> AttentionConfig:
    """Tiles that waste few rows, and as many programs as the GPU holds at a time."""
    batch, heads, count, head_dim = query.shape
    rows = count * (heads // kv_heads)
    tile = max(triton.next_power_of_2(rows), 8)
    if count > FEW_QUERIES or batch * heads * count * splits * head_dim > PARTIAL_SUMS:
        return AttentionConfig(min(tile, 32 if head_dim <= 128 else 16), 0)
    # Tiles of 32 rows spill registers, which a few queries have no other work to hide.
    tile = min(tile, 16)
    multiprocessors = 1
    if query.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    tiles = batch * kv_heads * triton.cdiv(rows, tile)
    # One more program than are held at a time would take as long again.
    programs = max(min(read_splits, RESIDENT * multiprocessors // tiles), 1)
    more = max(FEW_ROWS_RESIDENT * multiprocessors // tiles, 1)
    if tile <= FEW_ROWS and read_splits <= FEW_SPLITS * more:
        programs = min(read_splits, more)
    return AttentionConfig(tile, programs)


def _loads_ahead(config: AttentionConfig, splits: int, padded: int, read: int) -> bool:
    """Whether there are keys and values to load before they are used, and registers for them."""
    planes = 1 if read == BASE.value else 2
    several = 0 < FEW_SPLITS * config.programs < splits
    return several and config.rows * planes <= 16 and padded <= 64 and read != DENSE.value


def _attend(
    query: Tensor,
    positions: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    values: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    sliding_window: int,
    recent: int,
    sink: int,
    local: int,
    config: AttentionConfig | None,
    read: int,
) -> Tensor:
    """Launch the kernels over base, refinement and scale of keys and of values."""
    batch, heads, count, head_dim = query.shape
    kv_heads, capacity = keys[0].shape[1:3]
    shape = batch, count, heads, head_dim
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out.transpose(1, 2)
    check_programs("batch x KV heads", batch * kv_heads)
    splits = read_splits = triton.cdiv(capacity, SPLIT.value)
    if local > 0:
        most = triton.cdiv(sink, SPLIT.value) + triton.cdiv(local + count - 1, SPLIT.value) + 1
        read_splits = min(splits, most)
    config = config or _default_config(query, kv_heads, splits, read_splits)
    group = heads // kv_heads
    rows = count * group
    all_splits = config.programs == 0
    kept = 0 if all_splits else batch * kv_heads * rows * splits
    sums = torch.empty(kept, head_dim, dtype=torch.float32, device=query.device)
    references = torch.empty(3, kept, dtype=torch.float32, device=query.device)
    half = head_dim // 2
    padded = max(triton.next_power_of_2(half), 32)
    vector = 16 if padded >= 64 and half % 16 == 0 and read != DENSE.value else 8
    unit = 0 if read == DENSE.value else -4
    sizes = (kv_heads, group, capacity, count, splits)
    ahead = _loads_ahead(config, read_splits, padded, read)
    narrow = config.rows <= FEW_ROWS and config.programs > 0 and read != DENSE.value and not ahead
    attention_kernel[(triton.cdiv(rows, config.rows), batch * kv_heads, max(config.programs, 1))](
        query,
        positions,
        *keys,
        *values,
        out,
        sums,
        *references,
        *query.stride()[:3],
        *sizes,
        scaling * math.log2(math.e),
        sliding_window,
        recent,
        sink,
        local,
        HEAD_DIM=head_dim,
        PADDED=padded,
        ROWS=config.rows,
        VECTOR=vector,
        READ=read,
        WINDOW=sliding_window > 0,
        LOCAL=local > 0,
        UNIT=unit,
        ALL_SPLITS=all_splits,
        AHEAD=ahead,
        ASM=not triton.knobs.runtime.interpret,
        maxnreg=FEW_ROWS_REGISTERS if narrow else None,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    if all_splits:
        return out.transpose(1, 2)
    combine_kernel[(batch * heads * count, triton.cdiv(head_dim, COMBINED_COLUMNS))](
        positions,
        sums,
        *references,
        out,
        *sizes,
        sliding_window,
        sink,
        local,
        HEAD_DIM=head_dim,
        COLUMNS=COMBINED_COLUMNS,
        PADDED_SPLITS=triton.next_power_of_2(splits),
        UNROLL=min(triton.next_power_of_2(splits), 16),
        WINDOW=sliding_window > 0,
        LOCAL=local > 0,
        UNIT=unit,
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out.transpose(1, 2)
