"""How unequal the channels of a model's keys are, and whether 4 bits need them rotated.

Biases of key projections give some models (Qwen2 and Qwen2.5 among them) a few channels that are
tens of times larger than the rest. A key of 4 bits has one scale (:mod:`nestq.reference.kv`), so
such a channel leaves the others hardly a code, and with them goes what tells one token's key from
another's. A Hadamard transform of keys and queries spreads it over the head.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from nestq.architectures import Architecture
from nestq.calibration import LayerInputs, moved
from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.kv_policy import WHOLE

# A channel so many times the median leaves 4-bit keys twice the error that they have rotated, at
# head sizes of 64 and 128 (keys of normal numbers with one such channel); up to twice the median,
# rotation changes nothing.
UNEVEN = 6.0
# More tokens hardly change a root mean square.
TOKENS = 2048
CACHED = 256

_log = logging.getLogger("nestq.key_channels")


@dataclass(frozen=True)
class KeyChannels:
    """Root mean squares of key channels, after rotary embeddings.

    Attributes:
        rms: of each layer, float32 ``[H_kv, D]``.
    """

    rms: list[Tensor]

    @property
    def unevenness(self) -> list[float]:
        """Of each layer, the largest channel over the median one of its head, in the worst head."""
        return [
            float((rms.amax(-1) / rms.median(-1).values.clamp(min=1e-30)).max()) for rms in self.rms
        ]

    @property
    def need_rotation(self) -> bool:
        """Whether a layer has channels so large that 4-bit keys lose the others."""
        return max(self.unevenness) > UNEVEN

    def notes(self) -> list[str]:
        """What a user should know: nothing, where keys are not rotated."""
        if not self.need_rotation:
            return []
        worst = max(self.unevenness)
        return [
            f"caches store keys rotated (rotate_keys of NestedKVCache): in layer "
            f"{self.unevenness.index(worst)} a key channel is {worst:.1f} times the median one of "
            f"its head, and more than {UNEVEN:g} times leave 4-bit keys few codes for the others"
        ]


def cached_key_channels(cache: NestedKVCache) -> KeyChannels:
    """Measure the keys that a cache holds: the first ``CACHED`` verified ones of its first row."""
    length = min(int(cache.lengths[0]), CACHED)
    layers: list[Any] = cache.layers
    keys = (layer.key_planes.dense(WHOLE, length, torch.float32)[0] for layer in layers)
    return KeyChannels([one.square().mean(1).sqrt().cpu() for one in keys])


class _KeyRecorder(DynamicCache):
    """A cache that forgets, and sums up the squares of the keys that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.squares: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take notice of keys ``[B, H_kv, n, D]``."""
        squares = key_states.float().square().sum((0, 2))
        old = self.squares.get(layer_idx)
        self.squares[layer_idx] = squares if old is None else old + squares
        return key_states, value_states


@torch.no_grad()
def measure_key_channels(
    architecture: Architecture, windows: Tensor, batch_size: int, device: torch.device
) -> KeyChannels:
    """Run calibration text through a model, layer by layer, and measure its keys.

    Args:
        architecture: of the model, before its linears are nested.
        windows: token ids ``[n, length]``; about the first ``TOKENS`` of them are used.
        batch_size: rows that go through at once.
        device: where layers compute.
    """
    windows = windows[: -(-TOKENS // windows.shape[1])]
    inputs = LayerInputs(architecture, windows, batch_size, device)
    recorder, keyword = _KeyRecorder(), cache_keyword(architecture.model)
    for calls in inputs.kwargs:
        for kwargs in calls:
            kwargs[keyword] = recorder
    for index, layer in enumerate(architecture.layers):
        with moved(layer, device):
            inputs.hidden = inputs.run(layer, index)
    found = KeyChannels(
        [(recorder.squares[i] / windows.numel()).sqrt().cpu() for i in sorted(recorder.squares)]
    )
    for note in found.notes():
        _log.info(note)
    return found
