"""The caches that a model can decode with, and which of them a policy asks for."""

import torch
from transformers import PreTrainedConfig

from nestq.kv_cache import NestedKVCache
from nestq.kv_policy import KVPolicy
from nestq.quantspec_kv_cache import QuantSpecKVCache

KVCache = NestedKVCache | QuantSpecKVCache


def new_cache(
    policy: KVPolicy,
    config: PreTrainedConfig,
    max_length: int,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> KVCache:
    """An empty cache that drafts read as a policy says.

    Args:
        policy: what drafts read.
        config: of the model.
        max_length: positions to allocate.
        batch_size: rows to allocate.
        device: of the cache.
        dtype: of the model, in which a cache may keep some tokens.
    """
    if policy.kind == "quantspec":
        return QuantSpecKVCache(config, max_length, batch_size, device, dtype)
    return NestedKVCache(config, max_length, batch_size, device, policy)
