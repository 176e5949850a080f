"""The caches that a model can decode with, and which of them a policy asks for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig

from nestq.dense_kv_cache import DenseKVCache
from nestq.kv_cache import NestedKVCache
from nestq.kv_policy import KVPolicy
from nestq.quantspec_kv_cache import QuantSpecKVCache
from nestq.snapkv_cache import SnapKVCache
from nestq.sparse_reads import SnapKV

KVCache = NestedKVCache | DenseKVCache | QuantSpecKVCache | SnapKVCache
# Those that a later call can continue: what they hold of the past does not depend on the call.
CONTINUED = NestedKVCache | DenseKVCache


def new_cache(
    policy: KVPolicy,
    config: PreTrainedConfig,
    max_length: int,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    room: int | None = None,
) -> KVCache:
    """An empty cache that drafts read as a policy says.

    Args:
        policy: what drafts read.
        config: of the model.
        max_length: positions to allocate.
        batch_size: rows to allocate.
        device: of the cache.
        dtype: of the model, in which a cache may keep some tokens.
        room: positions there may be after the prompt, if that bounds what a cache keeps for drafts
            alone; None for max_length.

    Raises:
        ValueError: the model cannot have such a cache.
    """
    if isinstance(policy.sparse, SnapKV):
        compact = min(policy.sparse.budget + (max_length if room is None else room), max_length)
        full, copy = (
            new_cache(policy.stored(), config, length, batch_size, device, dtype)
            for length in (max_length, compact)
        )
        assert isinstance(full, CONTINUED)
        assert isinstance(copy, CONTINUED)
        return SnapKVCache(config, full, copy, policy, dtype)
    if policy.kind == "quantspec":
        return QuantSpecKVCache(config, max_length, batch_size, device, dtype)
    if policy.kind == "dense":
        return DenseKVCache(config, max_length, batch_size, device, dtype, policy)
    return NestedKVCache(config, max_length, batch_size, device, policy)


def can_continue(policy: KVPolicy) -> bool:
    """Whether a later call can continue a policy's cache."""
    return policy.kind != "quantspec" and not isinstance(policy.sparse, SnapKV)


def draft_room(policy: KVPolicy, positions: int) -> int:
    """Room that a policy's cache needs for drafts alone.

    Args:
        policy: of the cache.
        positions: there may be so many after the prompt.
    """
    return positions if isinstance(policy.sparse, SnapKV) else 0


def check_draft_room(cache: KVCache, positions: int) -> None:
    """Refuse a cache that keeps too little for drafts after the prompt.

    Args:
        cache: the user's.
        positions: there may be so many after the prompt.
    """
    if isinstance(cache, SnapKVCache) and not cache.has_room(positions):
        raise ValueError(
            f"cache must have room for {cache.budget} positions of a prompt and {positions} after "
            f"it in what drafts read, got {cache.compact.get_max_length()}: leave cache out, or "
            "give that of a call that generated as many tokens"
        )


@contextmanager
def reading_prompt(cache: KVCache) -> Iterator[None]:
    """Context in which the prompts of a call are read; at its end ``lengths`` is that of each."""
    if not isinstance(cache, SnapKVCache):
        yield
        return
    with cache.reading_prompt():
        yield
