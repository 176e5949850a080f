"""Rounds as CUDA graphs: captured once for a shape, replayed in every round of later calls too.

A graph reads and writes fixed addresses. So the decoding state, the KV cache among it, outlives the
call that made it, and the next call of the same shape takes it over.
"""

import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache
from nestq.kv_policy import KVPolicy, KVRead
from nestq.speculative.round import NestedForward, Round
from nestq.speculative.selection import Selection
from nestq.speculative.state import DecodingState

# Shapes whose graphs and caches a model keeps between calls; the one used last stays longest.
KEPT = 2


class Shape(NamedTuple):
    """What a captured round depends on."""

    batch: int
    columns: int
    gamma: int
    ends: int
    policy: KVPolicy
    forward: int
    """Identity of the module that computes."""
    addresses: int
    """Hash of where the weights lie."""
    selection: Hashable
    """Kind and constants of the selection."""


class RoundGraphs:
    """Graphs of one round, one for each way in which drafts may read the cache.

    Args:
        policy: what drafts read of the cache, depending on the context's length.
    """

    def __init__(self, policy: KVPolicy) -> None:
        self._policy = policy
        self._graphs: dict[KVRead, torch.cuda.CUDAGraph] = {}

    def capture(self, run: Callable[[int], None], lengths: tuple[int, int]) -> None:
        """Capture the graphs for contexts of the given shortest and longest length.

        It runs a round for each, which changes the decoding state and leaves no other trace.

        Args:
            run: one round, given the length of the context.
            lengths: positions, from and to.
        """
        reads = {self._policy.read("draft", length): length for length in lengths}
        missing = {read: length for read, length in reads.items() if read not in self._graphs}
        for read, length in tqdm(
            missing.items(), desc="capturing a round", file=sys.stderr, leave=False
        ):
            # What compiles or measures when it first runs must have run.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run(length)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run(length)
            self._graphs[read] = graph

    def replay(self, length: int) -> None:
        """Run a round at a context length."""
        self._graphs[self._policy.read("draft", length)].replay()


@dataclass
class CapturedDecoding:
    """A decoding state and the rounds that were captured over it, with the selection they use."""

    shape: Shape
    state: DecodingState
    selection: Selection
    graphs: RoundGraphs
    lent: "ref[NestedKVCache] | None" = None
    """The cache as it was returned to the user; while it lives, the state is the user's."""

    def lend_cache(self) -> NestedKVCache:
        """The state's cache under another object, whose life says how long it is needed."""
        cache = self.state.cache
        lent = cache.__class__.__new__(cache.__class__)
        lent.__dict__.update(cache.__dict__)
        self.lent = ref(lent)
        return lent


_kept: "WeakKeyDictionary[PreTrainedModel, list[CapturedDecoding]]" = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def captured_decoding(
    model: PreTrainedModel,
    shape: Shape,
    cache: NestedKVCache | None,
    selection: Selection,
    keep: bool,
) -> Iterator[CapturedDecoding]:
    """Context that has a state of a shape to itself: one that is kept and not in use, or a new one.

    Args:
        model: that decodes.
        shape: of the state and its graphs.
        cache: the user's, for a new state; None to allocate one.
        selection: for a new state; a kept one has its own, with the same key.
        keep: whether to look for a kept state, and to keep this one unless there is an error.
    """
    if not keep:
        yield _new(model, shape, cache, selection)
        return
    with _lock:
        kept = _kept.setdefault(model, [])
        # Graphs of weights that moved cannot be replayed.
        kept[:] = [entry for entry in kept if entry.shape.addresses == shape.addresses]
        free = [e for e in kept if e.shape == shape and (e.lent is None or e.lent() is None)]
        entry = free[-1] if free else None
        if entry is not None:
            kept.remove(entry)
        elif len(kept) >= KEPT:
            # Make room before a cache is allocated.
            del kept[0]
    entry = entry or _new(model, shape, cache, selection)
    entry.lent = None
    yield entry
    with _lock:
        kept.append(entry)
        del kept[:-KEPT]


def _new(
    model: PreTrainedModel, shape: Shape, cache: NestedKVCache | None, selection: Selection
) -> CapturedDecoding:
    if cache is None:
        config = model.config.get_text_config(decoder=True)
        cache = NestedKVCache(config, shape.columns, shape.batch, model.device, shape.policy)
    state = DecodingState(cache, shape.columns, shape.gamma, shape.ends)
    return CapturedDecoding(shape, state, selection, RoundGraphs(shape.policy))


def capture_rounds(
    captured: CapturedDecoding,
    model: PreTrainedModel,
    forward: Callable[..., Any],
    lengths: tuple[int, int],
) -> None:
    """Capture what is not captured yet of a decoding.

    A model that is not compiled is traced, so that the passes can fuse its operators.

    Args:
        captured: a state, the selection and their graphs.
        model: the transformers model.
        forward: what computes: the model, or what ``torch.compile`` made of it.
        lengths: positions that contexts have, from and to.
    """
    state = captured.state

    def one_round(forward: Callable[..., Any]) -> Round:
        nested = NestedForward(model, forward, state.cache, state.pads)
        gamma = len(state.accepted_per_position)
        return Round(nested, state, gamma, captured.selection, lambda phase: nullcontext())

    if forward is model and model._compiled_call_impl is None:
        # Passes come with Inductor, which takes long to import.
        from nestq.passes.backend import traced

        try:
            captured.graphs.capture(one_round(traced(model)), lengths)
            return
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"{type(model).__name__} cannot be traced, so that its operators are not fused and "
                f"decoding is slower: {reason}",
                stacklevel=2,
            )
    captured.graphs.capture(one_round(forward), lengths)


def release_graphs(model: PreTrainedModel) -> None:
    """Free the graphs and KV caches that earlier calls left for later ones.

    Args:
        model: that decoded, or what ``torch.compile`` made of it.
    """
    with _lock:
        _kept.pop(getattr(model, "_orig_mod", model), None)


def round_up_columns(columns: int) -> int:
    """Columns that a shape has: at most a quarter more than asked for, so that calls share it."""
    step = max(1 << (columns - 1).bit_length() >> 3, 64)
    return -(-columns // step) * step


def addresses(model: PreTrainedModel) -> int:
    """Hash of where the weights and buffers of a model lie."""
    tensors = [*model.parameters(), *model.buffers()]
    return hash(tuple(plane.data_ptr() for tensor in tensors for plane in _planes(tensor)))


def _planes(tensor: Tensor) -> list[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
