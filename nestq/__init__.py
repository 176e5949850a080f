"""nestq: self-speculative decoding from one bit-nested model."""

# ruff: noqa: E402
import logging

# Importing torchao reports each of its CUDA libraries that this machine cannot load, and what it
# registers twice with PyTorch.
_levels = {name: logging.getLogger(name).level for name in ("torchao", "torch.utils._pytree")}
for _name in _levels:
    logging.getLogger(_name).setLevel(logging.ERROR)

from nestq.checkpoint import load, save
from nestq.four_bit_recipe import FourBitRecipe, qspec_w4, quantspec_w4w16, w4a8, w4a16
from nestq.four_bit_tensor import FourBitTensor
from nestq.kv_cache import NestedKVCache
from nestq.kv_policy import KVPolicy, snapkv, streaming_llm
from nestq.ops import select_implementation
from nestq.quantize import quantize_
from nestq.quantspec_kv_cache import QuantSpecKVCache
from nestq.recipes import bitnest_w4w8, w8a8
from nestq.report import QuantizationReport
from nestq.skipping_recipe import SkippingRecipe, draft_and_verify
from nestq.speculative import (
    DecodingMetrics,
    SpeculativeOutput,
    decode,
    release_graphs,
    speculative_generate,
)
from nestq.static_cache import nest_static_cache_
from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

for _name, _level in _levels.items():
    logging.getLogger(_name).setLevel(_level)

__version__ = "0.1.0"

__all__ = [
    "DecodingMetrics",
    "FourBitRecipe",
    "FourBitTensor",
    "KVPolicy",
    "NestedKVCache",
    "NestedQuantTensor",
    "QuantSpecKVCache",
    "QuantizationReport",
    "SkippingRecipe",
    "SpeculativeOutput",
    "bitnest_w4w8",
    "decode",
    "draft_and_verify",
    "load",
    "nest_static_cache_",
    "nest_view",
    "qspec_w4",
    "quantize_",
    "quantspec_w4w16",
    "release_graphs",
    "save",
    "select_implementation",
    "snapkv",
    "speculative_generate",
    "streaming_llm",
    "w4a8",
    "w4a16",
    "w8a8",
]
