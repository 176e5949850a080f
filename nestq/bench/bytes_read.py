"""Bytes that a forward pass must read: what its time is compared with.

Activations, the few rows of the embedding and what is written are left out: they are small.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from nestq.four_bit_tensor import FourBitTensor
from nestq.kv_cache import head_sizes
from nestq.kv_caches import KVCache
from nestq.kv_policy import KVPolicy, KVRead
from nestq.reference.kv_quantspec import GROUP, value_groups
from nestq.sparse_reads import SparseRead, StreamingLLM
from nestq.tensor import NestedQuantTensor
from nestq.view import View


def weight_bytes(model: nn.Module, view: View) -> int:
    """Bytes of the weights that a view reads: linears, the head among them, biases and norms."""
    return sum(
        _tensor_bytes(parameter, view)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)  # a head that is the same parameter is a linear
        for parameter in module.parameters(recurse=False)
    )


def _tensor_bytes(tensor: Tensor, view: View) -> int:
    if not isinstance(tensor, NestedQuantTensor | FourBitTensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    unread = {"refinement", "dense"} if view == "draft" else set()
    if view == "target" and "dense" in names:
        unread = {"base", "scale", "unit"}
    return sum(getattr(tensor, name).nbytes for name in names if name not in unread)


def cache_tensors(cache: KVCache) -> list[Tensor]:
    """Tensors that hold keys and values, and what belongs to them, such as scales."""
    return [tensor for layer in cache.layers for tensor in _tensors_of(layer)]


def _tensors_of(holder: Any) -> list[Tensor]:
    """Tensors that an object has, and those of its own objects, such as planes."""
    found: list[Tensor] = []
    for value in vars(holder).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value).__module__.startswith("nestq.") and hasattr(value, "__dict__"):
            found += _tensors_of(value)
    return found


def kv_bytes(
    config: PreTrainedConfig,
    policy: KVPolicy,
    view: View,
    context: int,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    skipped: Collection[int] = (),
) -> int:
    """Bytes of a cache that attention of a view reads in one forward pass.

    Args:
        config: of the language model.
        policy: what is stored and read.
        view: that reads; with sparse drafts, the draft reads few positions.
        context: positions of each row before the pass, all of a prompt.
        tokens: of the pass, which its queries read, too.
        batch: rows.
        dtype: of what is stored in 16 bits.
        skipped: indices of the layers whose attention computes nothing.
    """
    keys = context + tokens
    if view == "draft" and policy.sparse is not None:
        keys = _attended(policy.sparse, context, tokens)
    if policy.kind == "dense":
        return dense_kv_bytes(config, keys, batch, dtype, skipped)
    if policy.kind == "quantspec":
        return _quantspec_kv_bytes(config, keys, batch, dtype, view, skipped)
    return nested_kv_bytes(config, keys, batch, policy.read(view, context), skipped)


def _attended(sparse: SparseRead, context: int, tokens: int) -> int:
    """Positions that a sparse draft attends to."""
    if isinstance(sparse, StreamingLLM):
        return min(context + tokens, sparse.sink + sparse.recent)
    return min(context, sparse.budget) + tokens


def nested_kv_bytes(
    config: PreTrainedConfig, keys: int, batch: int, read: KVRead, skipped: Collection[int] = ()
) -> int:
    """Bytes of a nested cache that attention reads over ``keys`` positions of each row."""
    heads, head_dim = head_sizes(config)
    total = 0
    for visible in _visible(config, keys, skipped):
        refined = min(visible, read.recent or visible) if read.refinement else 0
        # A float32 scale for each vector, and half a byte a code for each plane.
        total += visible * 4 + (visible + refined) * (head_dim // 2)
    return 2 * batch * heads * total


def dense_kv_bytes(
    config: PreTrainedConfig,
    keys: int,
    batch: int,
    dtype: torch.dtype,
    skipped: Collection[int] = (),
) -> int:
    """Bytes of a dense cache that attention reads over ``keys`` positions of each row."""
    heads, head_dim = head_sizes(config)
    return 2 * batch * heads * sum(_visible(config, keys, skipped)) * head_dim * dtype.itemsize


def _quantspec_kv_bytes(
    config: PreTrainedConfig,
    keys: int,
    batch: int,
    dtype: torch.dtype,
    view: View,
    skipped: Collection[int],
) -> int:
    """Bytes of a hierarchical cache: the last tokens in 16 bits, whole groups of older ones not."""
    heads, head_dim = head_sizes(config)
    # The last query, at position p, reads the last G + p % G + 1 tokens as they are.
    recent = min(keys, GROUP + (keys - 1) % GROUP + 1)
    planes = 1 if view == "draft" else 2
    total = 0
    for visible in _visible(config, keys, skipped):
        old = max(0, visible - recent)
        total += 2 * min(visible, recent) * head_dim * dtype.itemsize
        total += 2 * planes * old * (head_dim // 2)
        # A float32 scale and zero point for each key channel of a group and each group of a value.
        total += 8 * (-(-old // GROUP) * head_dim + old * value_groups(head_dim))
    return batch * heads * total


def _visible(config: Any, keys: int, skipped: Collection[int]) -> list[int]:
    """For each layer that attends, how many of ``keys`` positions it sees."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    return [
        min(keys, window) if window and kind == "sliding_attention" else keys
        for index, kind in enumerate(kinds)
        if index not in skipped
    ]
