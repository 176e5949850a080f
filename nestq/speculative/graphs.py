"""Rounds as CUDA graphs: captured once for a shape, replayed in every round of later calls too.

A graph reads and writes fixed addresses. So the decoding state, the KV cache among it, outlives the
call that made it, and the next call of the same shape takes it over.
"""

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from tqdm import tqdm
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from nestq.kv_cache import KVPlanes
from nestq.kv_caches import KVCache, new_cache
from nestq.kv_policy import KVPolicy, KVRead
from nestq.plane_placement import place_side_by_side_
from nestq.quantspec_kv_cache import QuantSpecPlanes
from nestq.speculative.adaptive import RoundTimes
from nestq.speculative.round import NestedForward
from nestq.speculative.round_kinds import RoundKind, round_of
from nestq.speculative.selection import Selection
from nestq.speculative.state import DecodingState

log = logging.getLogger("nestq.speculative")

Result = TypeVar("Result")
PLANES = KVPlanes | QuantSpecPlanes
# Shapes whose graphs and caches a model keeps between calls; the one used last stays longest.
KEPT = 2
WARM_UP_ROUNDS = 2


class Shape(NamedTuple):
    """What captured rounds depend on."""

    batch: int
    columns: int
    kinds: tuple[RoundKind, ...]
    ends: int
    policy: KVPolicy
    model: Hashable
    """The model's state (``graph_key.model_key``)."""
    settings: Hashable
    """Of PyTorch (``graph_key.settings_key``)."""
    selection: Hashable
    """Kind and constants of the selection."""
    room: int = 0
    """Positions after a prompt that the cache has room for in what it keeps for drafts alone."""


class RoundGraphs:
    """Graphs of rounds, one for each kind and way in which drafts may read the cache.

    Args:
        policy: what drafts read of the cache, depending on the context's length.
    """

    def __init__(self, policy: KVPolicy) -> None:
        self._policy = policy
        self._graphs: dict[tuple[RoundKind, KVRead], torch.cuda.CUDAGraph] = {}

    def capture(
        self, rounds: Mapping[RoundKind, Callable[[int], None]], lengths: tuple[int, int]
    ) -> None:
        """Capture the graphs for contexts of the given shortest and longest length.

        It runs a round for each, which changes the decoding state and leaves no other trace.

        Args:
            rounds: one of each kind, given the length of the context.
            lengths: positions, from and to.
        """
        reads = {self._policy.read("draft", length): length for length in lengths}
        missing = [
            (kind, read) for kind in rounds for read in reads if (kind, read) not in self._graphs
        ]
        bar = tqdm(
            missing,
            desc="capturing a round",
            file=sys.stderr,
            leave=False,
            disable=not missing,
        )
        for kind, read in bar:
            # A process can capture one graph at a time.
            with _capturing:
                self._graphs[kind, read] = self._captured(rounds[kind], reads[read])

    def _captured(self, run: Callable[[int], None], length: int) -> torch.cuda.CUDAGraph:
        # What compiles or measures when it first runs must have run; some of it, when a second
        # round finds other lengths.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_ROUNDS):
                    run(length)
        finally:
            torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Nothing but the state outlives a round, so that all can use the same memory.
        pool = next((other.pool() for other in self._graphs.values()), None)
        # Other threads may allocate meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run(length)
        return graph

    def replay(self, kind: RoundKind, length: int) -> None:
        """Run a round of a kind at a context length."""
        self._graphs[kind, self._policy.read("draft", length)].replay()


@dataclass
class CapturedDecoding:
    """A decoding state and the rounds that were captured over it, with the selection they use.

    The times of the rounds are those of calls so far.
    """

    shape: Shape
    forward: "ref[Callable[..., Any]]"
    """What computes. Its identity alone could be that of another one later."""
    state: DecodingState
    selection: Selection
    graphs: RoundGraphs
    times: RoundTimes = field(default_factory=RoundTimes)
    lent: "ref[_Lease] | None" = None
    """While what was returned to the user lives, the state is the user's."""
    untraceable: bool = False
    """Whether the model could not be traced, and computes itself."""

    def lend_cache(self) -> KVCache:
        """The state's cache for the user, whose objects say by their life how long it is needed.

        They are objects of their own, so that what is done to them, short of writing into their
        tensors, is not done to the state.
        """
        lease = _Lease()
        self.lent = ref(lease)
        return _leased(self.state.cache, lease)


class _Lease:
    """Lives as long as anything of a cache that was lent."""


def _leased(part: Any, lease: _Lease) -> Any:
    """A copy of a cache, a layer or planes, and of all of these that are parts of it."""
    if isinstance(part, list):
        return [_leased(one, lease) for one in part]
    if not isinstance(part, Cache | CacheLayerMixin | PLANES):
        return part
    leased = copy.copy(part)
    inner = {name: _leased(value, lease) for name, value in vars(part).items()}
    leased.__dict__.update(inner, _lease=lease)
    return leased


_kept: "WeakKeyDictionary[PreTrainedModel, list[CapturedDecoding]]" = WeakKeyDictionary()
_lock = Lock()
_capturing = Lock()


def settle(model: PreTrainedModel) -> None:
    """Lay the weights of a model as kernels read them best.

    Once they are laid so, they stay there: graphs that other threads replay find them.
    """
    with _capturing:
        place_side_by_side_(model)


def with_room(run: Callable[[], Result]) -> Result:
    """What ``run`` returns. If memory runs out, kept states go, and it runs once more.

    Kept are only states that no call uses at the time. Tensors of a cache that was returned to the
    user stay.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        with _lock:
            count = sum(map(len, _kept.values()))
            for entries in _kept.values():
                entries.clear()
        if not count:
            raise
    # Outside of the handler, where the error's traceback does not hold tensors any more.
    log.warning(
        "memory ran out: released %d decoding state(s) with CUDA graphs and KV cache that earlier "
        "calls left for later ones, and trying once more",
        count,
    )
    return run()


@contextmanager
def captured_decoding(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    shape: Shape,
    cache: KVCache | None,
    selection: Selection,
    keep: bool,
) -> Iterator[CapturedDecoding]:
    """Context that has a state of a shape to itself: one that is kept and not in use, or a new one.

    Args:
        model: that decodes.
        forward: what computes: the model, or what was made of it.
        shape: of the state and its graphs.
        cache: the user's, for a new state; None to allocate one.
        selection: for a new state; a kept one has its own, with the same key.
        keep: whether to look for a kept state, and to keep this one unless there is an error.
    """

    def new() -> CapturedDecoding:
        return with_room(lambda: _new(model, forward, shape, cache, selection))

    if not keep:
        yield new()
        return
    with _lock:
        kept = _kept.setdefault(model, [])
        # Graphs of weights that moved cannot be replayed, nor those of a model that has changed.
        kept[:] = [entry for entry in kept if entry.shape.model == shape.model]
        free = [e for e in kept if e.lent is None or e.lent() is None]
        fitting = [e for e in free if e.shape == shape and e.forward() is forward]
        entry = fitting[-1] if fitting else None
        if entry is not None:
            kept.remove(entry)
        elif len(kept) >= KEPT:
            # Make room before a cache is allocated. What is lent cannot be used again soon.
            kept.remove(next((e for e in kept if e not in free), kept[0]))
    entry = entry or new()
    entry.lent = None
    yield entry
    with _lock:
        kept.append(entry)
        del kept[:-KEPT]


def _new(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    shape: Shape,
    cache: KVCache | None,
    selection: Selection,
) -> CapturedDecoding:
    # Tensors of inference mode could not be written by a later call outside it.
    with torch.inference_mode(False):
        if cache is None:
            cache = new_cache(
                shape.policy,
                model.config,
                shape.columns,
                shape.batch,
                model.device,
                model.dtype,
                shape.room,
            )
        gamma = max(kind.tokens for kind in shape.kinds)
        state = DecodingState(cache, shape.columns, gamma, shape.ends)
    return CapturedDecoding(shape, ref(forward), state, selection, RoundGraphs(shape.policy))


def capture_rounds(
    captured: CapturedDecoding,
    model: PreTrainedModel,
    forward: Callable[..., Any],
    lengths: tuple[int, int],
    required: bool,
) -> bool:
    """Capture what is not captured yet of a decoding.

    A model that is not compiled is traced, so that the passes can fuse its operators. One that
    cannot be traced may look at numbers on the device, as a graph must not.

    Args:
        captured: a state, the selection and their graphs.
        model: the transformers model.
        forward: what computes: the model, or what ``torch.compile`` made of it.
        lengths: positions that contexts have, from and to.
        required: whether to try to capture a model that cannot be traced.

    Returns:
        Whether there are graphs now.
    """
    state = captured.state

    def rounds(forward: Callable[..., Any]) -> dict[RoundKind, Callable[[int], None]]:
        nested = NestedForward(model, forward, state.cache, state.pads)
        rest = nested, state, captured.selection, lambda phase: nullcontext()
        return {kind: round_of(kind, *rest) for kind in captured.shape.kinds}

    def capture(forward: Callable[..., Any]) -> None:
        # It forgets what a round kept in which memory ran out, or that could not be traced.
        captured.selection.begin(captured.selection)
        captured.graphs.capture(rounds(forward), lengths)

    if forward is model and model._compiled_call_impl is None:
        # Passes come with Inductor, which takes long to import.
        from nestq.passes.backend import traced

        try:
            with_room(lambda: capture(traced(model)))
            return True
        except torch._dynamo.exc.TorchDynamoException as error:
            captured.untraceable = True
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"{type(model).__name__} cannot be traced, so that its operators are not fused and "
                f"decoding is {'slower' if required else 'much slower'}: {reason}",
                stacklevel=2,
            )
        if not required:
            return False
    with_room(lambda: capture(forward))
    return True


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
