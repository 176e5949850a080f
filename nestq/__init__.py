"""nestq: self-speculative decoding from one bit-nested model."""

# ruff: noqa: E402
import logging

# Importing torchao reports each of its CUDA libraries that this machine cannot load, and what it
# registers twice with PyTorch.
_levels = {name: logging.getLogger(name).level for name in ("torchao", "torch.utils._pytree")}
for _name in _levels:
    logging.getLogger(_name).setLevel(logging.ERROR)

from nestq.checkpoint import load, save
from nestq.kv_cache import NestedKVCache
from nestq.kv_policy import KVPolicy
from nestq.ops import select_implementation
from nestq.quantize import quantize_
from nestq.quantspec_kv_cache import QuantSpecKVCache
from nestq.recipes import bitnest_w4w8, w8a8
from nestq.report import QuantizationReport
from nestq.speculative import (
    DecodingMetrics,
    SpeculativeOutput,
    decode,
    release_graphs,
    speculative_generate,
)
from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

for _name, _level in _levels.items():
    logging.getLogger(_name).setLevel(_level)

__version__ = "0.1.0"

__all__ = [
    "DecodingMetrics",
    "KVPolicy",
    "NestedKVCache",
    "NestedQuantTensor",
    "QuantSpecKVCache",
    "QuantizationReport",
    "SpeculativeOutput",
    "bitnest_w4w8",
    "decode",
    "load",
    "nest_view",
    "quantize_",
    "release_graphs",
    "save",
    "select_implementation",
    "speculative_generate",
    "w8a8",
]
