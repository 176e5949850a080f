"""A warning where drafts are rejected because of what 4 bits do to uneven key channels."""

import warnings

from nestq.key_channels import UNEVEN, cached_key_channels
from nestq.kv_cache import NestedKVCache
from nestq.kv_caches import KVCache
from nestq.speculative.metrics import DecodingMetrics

# Drafts of models that nestq quantized are accepted far more often than this.
COLLAPSED = 0.5
# Fewer draft tokens say little.
ENOUGH = 32


def warn_of_uneven_keys(cache: KVCache, metrics: DecodingMetrics, length: int) -> None:
    """Warn if most drafts were rejected that read 4-bit keys, uneven and not rotated.

    Nothing is looked at, and nothing waits for the device, unless acceptance is low.

    Args:
        cache: of the call.
        metrics: of the call.
        length: of the longest row, in tokens.
    """
    acceptance = metrics.slot_acceptance
    if acceptance is None or acceptance >= COLLAPSED or metrics.drafted < ENOUGH:
        return
    if not isinstance(cache, NestedKVCache) or cache.rotate_keys:
        return
    if cache.policy.read("draft", length).refinement:
        return
    worst = max(cached_key_channels(cache).unevenness)
    if worst > UNEVEN:
        warnings.warn(
            f"{1 - acceptance:.0%} of the draft tokens were rejected, and drafts read "
            f"4-bit keys of which a channel is {worst:.1f} times the median one of its head: pass "
            "cache=NestedKVCache(..., rotate_keys=True), as quantizing with calibration= arranges, "
            "or kv='kv8/kv8' or kv='quantspec'",
            stacklevel=2,
        )
