"""Attention over QuantSpec's hierarchical KV cache: planes, and a buffer in full precision.

The splits of the planes and of the buffer are parts of one flash decoding; see
``attention_quantspec_split`` and, for how work is divided, ``nested_attention``. A row has the same
bits whatever the other rows, the batch, the sizes of planes and buffer and the division are.
"""

import math

import torch
import triton
from torch import Tensor

from nestq.kernels.arguments import check_programs
from nestq.kernels.attention_quantspec_kernels import combine_quantspec_kernel, quantspec_kernel
from nestq.kernels.attention_split import SPLIT
from nestq.kernels.kv_codes import BASE, BOTH
from nestq.kernels.nested_attention import (
    COMBINED_COLUMNS,
    DENSE_DTYPES,
    FEW_QUERIES,
    MAX_HEAD_DIM,
    PARTIAL_SUMS,
    QUERY_DTYPES,
    RESIDENT,
    AttentionConfig,
)
from nestq.reference.attention_quantspec import check_call
from nestq.reference.kv_quantspec import check_key_planes, check_value_planes

# Rows of a matrix instruction; more would not fit the registers.
MAX_ROWS = 16


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
    config: AttentionConfig | None = None,
) -> Tensor:
    """Softmax attention as ``nestq.reference.attention_quantspec`` defines it.

    Nothing waits for the device: on a GPU nobody checks that the buffer holds what is read. What it
    holds at positions from ``first_recent`` of the first query to the last query must be finite.

    Args:
        query: float16, bfloat16 or float32 ``[B, H, n, D]``, contiguous along D; for recent tokens
            it is rounded to the dtype of the buffer. D is at most 128, or 256.
        positions: int64 ``[B, n]``, contiguous; negative for a pad, whose result is zero.
        key_base: uint8 ``[B, H_kv, S, D / 2]``, S a multiple of 128; like all that follow,
            contiguous.
        key_refinement: the same, or None to read the base only.
        key_scale: float32 ``[B, H_kv, S / 128, D]``.
        key_zero: the same.
        value_base: as for keys.
        value_refinement: as for keys; None for both or for neither.
        value_scale: float32 ``[B, H_kv, S, V]``, V of ``value_groups(D)``.
        value_zero: the same.
        recent_keys: float16 or bfloat16 ``[B, H_kv, R, D]``, R a multiple of 256; token j is in
            slot ``j % R``.
        recent_values: the same.
        scaling: factor of the scores.
        sliding_window: tokens that a query sees, itself included; 0 for all.
        config: how the work is divided, at most 16 rows a program; None for what suits the shapes.

    Returns:
        ``[B, H, n, D]`` in the dtype of the query; the heads of a query lie together in memory.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    check_key_planes(key_base, key_refinement, key_scale, key_zero)
    check_value_planes(value_base, value_refinement, value_scale, value_zero)
    if (key_refinement is None) != (value_refinement is None):
        raise ValueError("key_refinement and value_refinement must both be given or both be None")
    check_call(query, positions, key_base, value_base, recent_keys, recent_values)
    cache = {
        "key_base": key_base,
        "key_refinement": key_refinement,
        "key_scale": key_scale,
        "key_zero": key_zero,
        "value_base": value_base,
        "value_refinement": value_refinement,
        "value_scale": value_scale,
        "value_zero": value_zero,
        "recent_keys": recent_keys,
        "recent_values": recent_values,
    }
    _check(query, positions, {name: x for name, x in cache.items() if x is not None})
    if config is not None and config.rows > MAX_ROWS:
        raise ValueError(f"config must have at most {MAX_ROWS} rows, got {config.rows}")

    batch, heads, count, head_dim = query.shape
    kv_heads, capacity = key_base.shape[1:3]
    out = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    if out.numel() == 0:
        return out
    check_programs("batch x KV heads", batch * kv_heads)
    config = config or _default_config(query, key_base)
    group = heads // kv_heads
    rows = count * group
    splits = triton.cdiv(capacity, SPLIT.value)
    recent_splits = recent_keys.shape[2] // SPLIT.value
    parts = splits + recent_splits + 1
    all_splits = config.programs == 0
    kept = 0 if all_splits else batch * kv_heads * rows * parts
    sums = torch.empty(kept, head_dim, dtype=torch.float32, device=query.device)
    references = torch.empty(3, kept, dtype=torch.float32, device=query.device)
    padded = max(triton.next_power_of_2(head_dim // 2), 32)
    sizes = (kv_heads, group, capacity, count, splits, recent_splits)
    # One more program, for the buffer.
    programs = 1 if all_splits else config.programs + 1
    quantspec_kernel[(triton.cdiv(rows, config.rows), batch * kv_heads, programs)](
        query,
        positions,
        key_base.view(torch.int8),
        (key_base if key_refinement is None else key_refinement).view(torch.int8),
        key_scale,
        key_zero,
        value_base.view(torch.int8),
        (value_base if value_refinement is None else value_refinement).view(torch.int8),
        value_scale,
        value_zero,
        recent_keys,
        recent_values,
        out,
        sums,
        *references,
        *query.stride()[:3],
        *sizes,
        scaling * math.log2(math.e),
        sliding_window,
        HEAD_DIM=head_dim,
        PADDED=padded,
        ROWS=config.rows,
        VECTOR=16 if padded >= 64 and head_dim % 32 == 0 else 8,
        RECENT_VECTOR=16 if padded == 128 else 8,
        VALUE_GROUPS=value_scale.shape[3],
        READ=(BASE if key_refinement is None else BOTH).value,
        WINDOW=sliding_window > 0,
        ALL_SPLITS=all_splits,
        ASM=not triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    if all_splits:
        return out
    combine_quantspec_kernel[(batch * heads * count, triton.cdiv(head_dim, COMBINED_COLUMNS))](
        positions,
        sums,
        *references,
        out,
        *sizes,
        sliding_window,
        HEAD_DIM=head_dim,
        COLUMNS=COMBINED_COLUMNS,
        PADDED_PARTS=triton.next_power_of_2(parts),
        UNROLL=min(triton.next_power_of_2(parts), 16),
        WINDOW=sliding_window > 0,
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out


def _check(query: Tensor, positions: Tensor, cache: dict[str, Tensor]) -> None:
    """Refuse what the kernels do not read, beyond what does not fit together."""
    if query.dtype not in QUERY_DTYPES or query.stride(-1) != 1:
        raise ValueError(
            "query must be float16, bfloat16 or float32 and contiguous along D, "
            f"got {query.dtype} with strides {query.stride()}"
        )
    if query.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"query must have a head size of at most {MAX_HEAD_DIM}, got {query.shape[3]}"
        )
    keys = cache["recent_keys"]
    if keys.dtype not in DENSE_DTYPES or keys.shape[2] % SPLIT.value:
        raise ValueError(
            f"recent_keys must be float16 or bfloat16 with R a multiple of {SPLIT.value}, "
            f"got {keys.dtype} of shape {tuple(keys.shape)}"
        )
    values = cache["recent_values"]
    if values.dtype != keys.dtype:
        raise ValueError(f"recent_values must be {keys.dtype} as recent_keys, got {values.dtype}")
    for name, tensor in (cache | {"positions": positions}).items():
        if tensor.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _default_config(query: Tensor, key_base: Tensor) -> AttentionConfig:
    """Tiles that waste few rows, and as many programs as the GPU holds at a time."""
    batch, heads, count, head_dim = query.shape
    kv_heads, capacity = key_base.shape[1:3]
    splits = triton.cdiv(capacity, SPLIT.value)
    rows = count * (heads // kv_heads)
    tile = min(max(triton.next_power_of_2(rows), 8), MAX_ROWS)
    if count > FEW_QUERIES or batch * heads * count * splits * head_dim > PARTIAL_SUMS:
        return AttentionConfig(tile, 0)
    multiprocessors = 1
    if query.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    tiles = batch * kv_heads * triton.cdiv(rows, tile)
    # One of them takes the buffer. One more than are held at a time would take as long again.
    return AttentionConfig(tile, max(min(splits, RESIDENT * multiprocessors // tiles - 1), 1))
