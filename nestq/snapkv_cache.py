"""``SnapKVCache``: a cache with a compact copy for drafts, made when the prompt has been read.

SnapKV (Li et al. 2024, 4): the queries of the prompt's last w = 32 tokens vote for the positions
before them. A position's votes are its attention weights, summed over these queries and over the
query heads that share a KV head, then the largest among itself and its 3 neighbours on each side.
Each KV head keeps the ``budget - w`` positions of the most votes, the earlier of equals, and the
last w. A prompt of up to ``budget`` positions is kept whole.

The prompt is what has been read before the first round: all tokens but the last one, or the whole
of a prompt of embeddings or images. What is written later is kept, too. In the copy it follows
what was kept, slot by slot: the query at position p of a prompt of P positions, K of which are
kept, sees the slots up to ``p - P + K``. Keys hold rotary embeddings of where they were in the
text, and move with them.

The copy has ``budget`` positions and those after the prompt, in the format of the cache: so much
memory comes on top, and 32 queries a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from nestq.dense_kv_cache import DenseKVCache, DenseKVLayer, DenseStates
from nestq.kv_cache import (
    NestedKVCache,
    NestedStates,
    check_cache_positions,
    head_sizes,
)
from nestq.kv_policy import KVPolicy
from nestq.reference.kv import dequantize_kv
from nestq.sparse_reads import SNAPKV_KERNEL, SNAPKV_WINDOW, SnapKV
from nestq.view import current_view


@dataclass(frozen=True)
class PromptKeys:
    """Keys as a pass over a prompt reads them, and where attention is to leave its queries.

    Attributes:
        keys: what is read.
        queries: ``[B, H, w, D]``, the query at position p in slot ``p % w``, times the factor of
            the scores.
    """

    keys: NestedStates | DenseStates
    queries: Tensor

    @property
    def shape(self) -> Any:
        """Every attention of transformers asks for it first: refused, as by the keys."""
        return self.keys.shape

    def keep(self, query: Tensor, scaling: float) -> None:
        """Keep the last queries of a pass, ``[B, H, n, D]``, those of pads apart."""
        window = self.queries.shape[2]
        last, positions = query[:, :, -window:], self.keys.positions[:, -window:]
        # Positions of a row follow one another, negative ones of pads too: no slot occurs twice.
        slots = (positions % window)[:, None, :, None].expand_as(last)
        real = (positions >= 0)[:, None, :, None]
        scaled = (last * scaling).to(self.queries.dtype)
        self.queries.scatter_(2, slots, torch.where(real, scaled, self.queries.gather(2, slots)))


class SnapKVCache(Cache):
    """A cache and a compact copy of it, which drafts read; the target reads all.

    Used like a ``NestedKVCache``, inside :meth:`at`, with the prompt inside :meth:`reading_prompt`.

    Args:
        config: of the model, or of the whole of a multimodal one.
        full: what the target reads, empty.
        compact: the same kind of cache for drafts, with room for the budget and what follows the
            prompt.
        policy: with a :class:`SnapKV`.
        dtype: of queries that are kept.

    Attributes:
        policy: as given.
        full: as given.
        compact: as given.
        lengths: int64 ``[batch_size]`` on the device, verified positions of each row.

    Raises:
        ValueError: the model has sliding windows, whose layers cannot tell positions in the copy.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        full: NestedKVCache | DenseKVCache,
        compact: NestedKVCache | DenseKVCache,
        policy: KVPolicy,
        dtype: torch.dtype,
    ) -> None:
        config = config.get_text_config(decoder=True)
        _refuse_windows(config)
        self.policy = policy
        self.full, self.compact = full, compact
        self.lengths = full.lengths
        super().__init__(layers=full.layers)
        _, head_dim = head_sizes(config)
        batch, device = len(full.lengths), full.lengths.device
        shape = batch, config.num_attention_heads, SNAPKV_WINDOW, head_dim
        self._queries = [torch.zeros(shape, dtype=dtype, device=device) for _ in full.layers]
        # Of each row, int64 [B, 1]: what a position is moved by in the copy.
        self._shift = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._reads_prompt = False

    @property
    def layers(self) -> Any:
        """Those that the target reads."""
        return self.full.layers

    @layers.setter
    def layers(self, layers: Any) -> None:
        self.full.layers = layers

    @property
    def budget(self) -> int:
        """Positions of a prompt that are kept."""
        assert isinstance(self.policy.sparse, SnapKV)
        return self.policy.sparse.budget

    def has_room(self, positions: int) -> bool:
        """Whether the copy holds the budget and so many positions after the prompt."""
        enough = min(self.budget + positions, self.full.get_max_length())
        return self.compact.get_max_length() >= enough

    @contextmanager
    def reading_prompt(self) -> Iterator[None]:
        """Context in which prompts are read, each from position 0 on.

        At its end ``lengths`` must say how many positions there are, and the copy is made. The host
        waits for the device.
        """
        self._reads_prompt = True
        try:
            yield
            self._copy_kept()
        finally:
            self._reads_prompt = False

    @contextmanager
    def at(self, positions: Tensor, context_length: int | None = None) -> Iterator[None]:
        """As :meth:`NestedKVCache.at`."""
        check_cache_positions(positions, len(self.lengths))
        moved = torch.where(positions < 0, positions, positions + self._shift)
        with self.full.at(positions, context_length), self.compact.at(moved, context_length):
            yield

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write the states of a layer and return what attention is to read.

        Drafts write into the copy alone: verification writes their positions into both.

        Args:
            key_states: ``[B, H_kv, n, D]``.
            value_states: ``[B, H_kv, n, D]``.
            layer_idx: index of the layer.
            *args: ignored.
            **kwargs: ignored.

        Raises:
            TypeError: outside of :meth:`at`.
        """
        if self.full._positions is None:
            raise TypeError("a SnapKVCache can be used inside SnapKVCache.at(positions) only")
        states = key_states, value_states, layer_idx
        if self._reads_prompt:
            keys, values = self.full.update(*states)
            return PromptKeys(keys, self._queries[layer_idx]), values
        compact = self.compact.update(*states)
        return compact if current_view() == "draft" else self.full.update(*states)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """0: ``lengths`` says how many positions are valid."""
        return 0

    def reset(self) -> None:
        """Forget all positions; the memory stays."""
        self.full.reset()
        self.compact.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i what row ``beam_idx[i]`` was, in the same memory."""
        self.full.reorder_cache(beam_idx)
        self.compact.reorder_cache(beam_idx)
        self._shift.copy_(self._shift[beam_idx.to(self._shift.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self.full.batch_repeat_interleave(repeats)
        self.compact.batch_repeat_interleave(repeats)
        self.lengths = self.full.lengths
        self._shift = self._shift.repeat_interleave(repeats, 0)
        self._queries = [queries.repeat_interleave(repeats, 0) for queries in self._queries]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self.full.batch_select_indices(indices)
        self.compact.batch_select_indices(indices)
        self.lengths = self.full.lengths
        indices = indices.to(self._shift.device)
        self._shift = self._shift[indices]
        self._queries = [queries[indices] for queries in self._queries]

    def _copy_kept(self) -> None:
        lengths = self.lengths.tolist()
        both = zip(self.full.layers, self.compact.layers, self._queries, strict=True)
        for full, compact, queries in both:
            for row, length in enumerate(lengths):
                kept = self._kept(full, row, length, queries[row])
                for source, target in zip(_tensors(full), _tensors(compact), strict=True):
                    index = kept.view(*kept.shape, *[1] * (source.dim() - 3))
                    index = index.expand(*kept.shape, *source.shape[3:])
                    target[row, :, : kept.shape[1]] = source[row].gather(1, index)
        self._shift.copy_((self.lengths.clamp(max=self.budget) - self.lengths)[:, None])

    def _kept(self, layer: Any, row: int, length: int, queries: Tensor) -> Tensor:
        """Positions of a row that its KV heads keep, int64 ``[H_kv, K]``."""
        if length <= self.budget:
            heads = _tensors(layer)[0].shape[1]
            return torch.arange(length, device=self.lengths.device).expand(heads, -1)
        # Slots of the window's queries, in the order of positions.
        queries = queries.roll(-(length % SNAPKV_WINDOW), 1).float()
        keys = _keys(layer, row, length, self.policy)
        return kept_positions(prompt_votes(queries, keys), self.budget)


def prompt_votes(queries: Tensor, keys: Tensor) -> Tensor:
    """Votes ``[H_kv, P - w]`` for the positions of a prompt before its last w.

    Args:
        queries: float32 ``[H, w, D]`` of the last w positions, times the factor of the scores.
        keys: float32 ``[H_kv, P, D]``.
    """
    heads, window, head_dim = queries.shape
    kv_heads, length, _ = keys.shape
    scores = queries.reshape(kv_heads, -1, head_dim) @ keys.mT
    later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    scores[..., -window:].masked_fill_(later.repeat(heads // kv_heads, 1), -torch.inf)
    votes = scores.softmax(-1)[..., : length - window].sum(1)
    return F.max_pool1d(votes, SNAPKV_KERNEL, stride=1, padding=SNAPKV_KERNEL // 2)


def kept_positions(votes: Tensor, budget: int) -> Tensor:
    """Positions that each KV head keeps, int64 ``[H_kv, budget]``, ascending.

    Args:
        votes: ``[H_kv, P - w]``.
        budget: positions, w included.
    """
    heads, count = votes.shape
    best = votes.sort(descending=True, stable=True).indices[:, : budget - SNAPKV_WINDOW]
    last = torch.arange(count, count + SNAPKV_WINDOW, device=votes.device).expand(heads, -1)
    return torch.cat((best.sort().values, last), 1)


def _tensors(layer: Any) -> list[Tensor]:
    """All that a layer of either cache holds, each ``[B, H_kv, S, ...]``."""
    if isinstance(layer, DenseKVLayer):
        return [layer.keys, layer.values]
    planes = layer.key_planes, layer.value_planes
    return [x for one in planes for x in (one.base, one.refinement, one.scale)]


def _keys(layer: Any, row: int, length: int, policy: KVPolicy) -> Tensor:
    """Keys of a row as the target reads them, float32 ``[H_kv, length, D]``."""
    if isinstance(layer, DenseKVLayer):
        return layer.keys[row, :, :length].float()
    base, fine, scale = (x[row, :, :length] for x in _tensors(layer)[:3])
    whole = policy.read("target", length).refinement
    return dequantize_kv(base, fine if whole else None, scale, torch.float32)


def _refuse_windows(config: Any) -> None:
    kinds = getattr(config, "layer_types", None)
    has_windows = "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None)
    if has_windows:
        raise ValueError(
            "kv=...+snapkv(budget) is not supported for a model with sliding windows "
            f"({config.model_type}, sliding_window={config.sliding_window}): its layers attend by "
            "positions, which the kept keys have lost; take '+streaming(sink,recent)'"
        )
