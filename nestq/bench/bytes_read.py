"""Bytes that a forward pass must read: what its time is compared with.

Activations, the few rows of the embedding and what is written are left out: they are small.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from nestq.kv_cache import head_sizes
from nestq.kv_policy import KVRead
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
    if not isinstance(tensor, NestedQuantTensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    unread = {"refinement"} if view == "draft" else set()
    return sum(getattr(tensor, name).nbytes for name in names if name not in unread)


def nested_kv_bytes(config: PreTrainedConfig, keys: int, batch: int, read: KVRead) -> int:
    """Bytes of a nested cache that attention reads over ``keys`` positions of each row."""
    heads, head_dim = head_sizes(config)
    total = 0
    for visible in _visible(config, keys):
        refined = min(visible, read.recent or visible) if read.refinement else 0
        # A float32 scale for each vector, and half a byte a code for each plane.
        total += visible * 4 + (visible + refined) * (head_dim // 2)
    return 2 * batch * heads * total


def dense_kv_bytes(config: PreTrainedConfig, keys: int, batch: int, dtype: torch.dtype) -> int:
    """Bytes of a dense cache that attention reads over ``keys`` positions of each row."""
    heads, head_dim = head_sizes(config)
    return 2 * batch * heads * sum(_visible(config, keys)) * head_dim * dtype.itemsize


def _visible(config: Any, keys: int) -> list[int]:
    """For each layer, how many of ``keys`` positions attention sees."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    return [min(keys, window) if window and kind == "sliding_attention" else keys for kind in kinds]
