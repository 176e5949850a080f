"""Buffers of keys and values that a module updates by itself become nested planes.

What updates and reads a buffer is known by what it does: the update, the way to attention and the
mask are evaluated on the example, and the mask at every position of the cache. So the many ways to
spell them need no list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from nestq.passes.captured_call import getattr_path
from nestq.passes.graph_nodes import argument, calls, example
from nestq.passes.graph_values import evaluate, sources, spelled, writes, written_in_place
from nestq.passes.static_cache_inputs import CallInputs
from nestq.passes.static_cache_mask import sliding_window
from nestq.passes.static_cache_update import Update, match_update, no_cache


@dataclass(frozen=True)
class Read:
    """One attention and the two caches that it reads.

    Attributes:
        attention: the call of scaled_dot_product_attention.
        keys: what updates the buffer of the keys.
        values: what updates that of the values.
        scaling: of the scores.
        window: keys that a query sees, itself included; 0 for all.
    """

    attention: Node
    keys: Update
    values: Update
    scaling: float
    window: int


@dataclass
class StaticCaches:
    """Finds the caches of a captured module, each with its one update and its one attention.

    Before::

        keys.index_copy_(2, positions, new_keys)      # or keys[:, :, positions] = new_keys, ...
        values.index_copy_(2, positions, new_values)
        mask = torch.arange(S) <= positions[:, None]
        out = scaled_dot_product_attention(
            query, keys.repeat_interleave(4, 1), values.repeat_interleave(4, 1), mask
        )

    After::

        rows = positions.expand(B, -1)
        kv_append(new_keys, rows, *key_planes)
        kv_append(new_values, rows, *value_planes)
        out = nested_attention(query, rows, *key_planes, *value_planes, scaling, window, 0)

    Attributes:
        inputs: the module, its capture and the inputs of that.
    """

    inputs: CallInputs
    _memory: dict[Node, Any] = field(default_factory=dict)
    _seen: dict[str, Any] = field(default_factory=dict)
    _windows: dict[Any, int] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """Of the capture."""
        return self.inputs.call.graph

    def match(self) -> list[Read]:
        """All attentions over caches.

        Raises:
            ValueError: a buffer is written in another way than a cache, or what reads it is not
                attention of each position to all up to itself; it names the buffer.
        """
        updates = self._updates()
        attentions = [
            node for node in self.graph.nodes if calls(node, "scaled_dot_product_attention")
        ]
        reads: list[Read] = []
        for attention in attentions:
            found = [self._cache_of(attention, updates, side) for side in (1, 2)]
            if found[0] is None and found[1] is None:
                continue
            for side, other in ((0, 1), (1, 0)):
                if found[side] is None:
                    update = found[other]
                    assert update is not None
                    raise no_cache(update.buffer, "keys or values alone of an attention read it")
            keys, values = found
            assert keys is not None
            assert values is not None
            reads.append(self._read(attention, keys, values, list(updates.values())))
        read = [update.buffer for one in reads for update in (one.keys, one.values)]
        for name, update in updates.items():
            count = read.count(name)
            if count != 1:
                what = "no scaled_dot_product_attention reads it" if not count else "two read it"
                raise no_cache(name, f"{what}; {self._users(update)}")
        return reads

    def _updates(self) -> dict[str, Update]:
        """What updates each buffer that looks like a cache: floating point, of four dimensions."""
        found: dict[str, Update] = {}
        for node in writes(self.graph):
            target = node.args[0] if node.args else None
            if not isinstance(target, Node) or target not in self.inputs.call.attributes:
                self._refuse_written_view(target, node)
                continue
            name = self.inputs.call.attributes[target]
            buffer = getattr_path(self.inputs.module, name)
            if not _is_cache(buffer):
                continue
            if name in found:
                raise no_cache(name, f"it is written twice, the second time by {node.name}")
            update = match_update(name, buffer, node, self._value)
            same = {part: self._first(getattr(update, part)) for part in ("index", "start", "stop")}
            found[name] = replace(update, **same)
        return found

    def _first(self, node: Any) -> Any:
        """The first of all nodes that compute the same: layers may compute positions each."""
        return self._seen.setdefault(spelled(node), node)

    def _refuse_written_view(self, target: Any, node: Node) -> None:
        """A view of a buffer that is written."""
        of_target = getattr(target, "meta", {}).get("example_value")
        for source in sources(target) & self.inputs.call.attributes.keys():
            name = self.inputs.call.attributes[source]
            if _is_cache(getattr_path(self.inputs.module, name)) and isinstance(of_target, Tensor):
                raise no_cache(name, f"{node.name} writes a view of it")

    def _cache_of(self, attention: Node, updates: Mapping[str, Update], side: int) -> Update | None:
        """The cache that is the keys (side 1) or the values (2) of an attention."""
        states = argument(attention, side, ("query", "key", "value")[side])
        names = [
            name for node, name in self.inputs.call.attributes.items() if node in sources(states)
        ]
        found = [updates[name] for name in names if name in updates]
        # What is computed from attention over a cache, as the states of the next layer are.
        if not found or any(calls(n, "scaled_dot_product_attention") for n in sources(states)):
            return None
        if len(found) > 1:
            raise no_cache(found[0].buffer, f"attention reads it together with {found[1].buffer}")
        update = found[0]
        self._check_way(update, states, attention)
        return update

    def _check_way(self, update: Update, states: Node, attention: Node) -> None:
        """Refuse a way from a buffer to attention that is more than views and repeated heads."""
        buffer = update.node_of_buffer
        way = {n for n in sources(states, sizes=True) if buffer in sources(n, sizes=True)} - {
            buffer
        }
        for node in (buffer, *way):
            for user in node.users:
                if user is not update.node and user is not attention and user not in way:
                    raise no_cache(update.buffer, f"{user.name} ({_called(user)}) reads it, too")
                if user is not update.node and user < update.node:
                    raise no_cache(update.buffer, f"{user.name} reads it before it is updated")
        given = [*attention.args, *attention.kwargs.values()]
        if sum(states is one for one in given) != 1:
            raise no_cache(update.buffer, "attention reads it twice")
        writer = written_in_place(way, [update.node], self.graph)
        if writer is not None:
            raise no_cache(update.buffer, f"{writer.name} writes what attention reads of it")

    def _read(
        self, attention: Node, keys: Update, values: Update, updates: Sequence[Update]
    ) -> Read:
        """The attention, if it is one to all positions up to a query's own."""
        name = keys.buffer
        if (keys.index, keys.start, keys.layout) != (values.index, values.start, values.layout):
            raise no_cache(
                name, f"it and {values.buffer} are laid out or written at positions in two ways"
            )
        if keys.shape != values.shape:
            raise no_cache(name, f"its shape is not that of {values.buffer}")
        dropout = argument(attention, 4, "dropout_p", 0.0)
        if dropout != 0.0:
            raise no_cache(name, f"attention has dropout_p={dropout}")
        query = example(argument(attention, 0, "query"))
        scale = attention.kwargs.get("scale")
        if query is None or not (scale is None or isinstance(scale, (int, float))):
            raise no_cache(name, f"attention has the scale {scale}, which is no number")
        for update, side in ((keys, 1), (values, 2)):
            self._check_what_is_read(update, attention, side)
        window = self._window(attention, keys, [one.node for one in updates])
        scaling = float(query.shape[-1] ** -0.5 if scale is None else scale)
        return Read(attention, keys, values, scaling, window)

    def _check_what_is_read(self, update: Update, attention: Node, side: int) -> None:
        """Compare what attention gets for a buffer of random numbers with its heads, repeated."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(-100, 100, update.buffer_shape, generator=generator)
        buffer = getattr_path(self.inputs.module, update.buffer)
        numbers = numbers.to(buffer.device, buffer.dtype)
        known = self.inputs.known() | {update.node_of_buffer: numbers}
        states = argument(attention, side, ("query", "key", "value")[side])
        got = evaluate(states, known, {})
        heads = example(argument(attention, 0, "query")).shape[1]  # type: ignore[union-attr]
        expected = update.canonical(numbers)
        if heads % expected.shape[1]:
            raise no_cache(
                update.buffer, f"{heads} query heads do not share {expected.shape[1]} of it"
            )
        if not attention.kwargs.get("enable_gqa", False):
            expected = expected.repeat_interleave(heads // expected.shape[1], dim=1)
        if got.dim() != 4 or not torch.equal(got, expected[:, :, : got.shape[2]].to(got.dtype)):
            raise no_cache(
                update.buffer,
                f"attention reads {tuple(got.shape)} of it, which are not its first positions in "
                f"order, of each head once for every query head, {tuple(expected.shape)}",
            )

    def _window(self, attention: Node, update: Update, allowed: Sequence[Node]) -> int:
        """The sliding window of a mask that is causal by position; 0 for none."""
        mask = argument(attention, 3, "attn_mask")
        is_causal = argument(attention, 5, "is_causal", False)
        keys = argument(attention, 1, "key")
        size = _key_size(keys)
        memo = mask, is_causal, size, update.index, update.start
        if memo not in self._windows:
            root = self._root(update)
            self._check_sources(mask, root, update.buffer, allowed)
            self._windows[memo] = sliding_window(self.inputs, attention, update, root)
        return self._windows[memo]

    def _root(self, update: Update) -> Node | None:
        """The input that says at which positions a cache is updated; None if nothing does."""
        node = update.start if update.index is None else update.index
        chosen = self.inputs.read_by(node)
        if len(chosen) > 1:
            names = sorted(map(self.inputs.name, chosen))
            raise no_cache(
                update.buffer, f"its positions come from the inputs {names} and not from one"
            )
        return next(iter(chosen), None)

    def _check_sources(
        self, mask: Any, root: Node | None, name: str, allowed: Sequence[Node]
    ) -> None:
        for node in self.inputs.read_by(mask) - {root}:
            raise no_cache(
                name,
                f"the mask of its attention depends on the input {self.inputs.name(node)!r}, which "
                "does not say positions",
            )
        writer = written_in_place(sources(mask), allowed, self.graph)
        if writer is not None:
            raise no_cache(name, f"{writer.name} writes the mask of its attention in place")

    def at_the_ends(self, read: Read) -> list[list[Any]]:
        """The example at the first and at the last positions of a cache.

        Code that slices a cache treats it, when all of it is taken, in another way.
        """
        root = self._root(read.keys)
        last = read.keys.shape[2] - read.keys.count
        return [self.inputs.at(root, start) for start in (0, last)] if root is not None else []

    def _value(self, node: Any) -> Any:
        """The value of a node for the example."""
        return evaluate(node, self.inputs.known(), self._memory)

    def _users(self, update: Update) -> str:
        users = [user for user in update.node_of_buffer.users if user is not update.node]
        return "it is read by " + (", ".join(map(_called, users)) or "nothing")


def _is_cache(buffer: Tensor) -> bool:
    is_parameter = isinstance(buffer, nn.Parameter)
    return buffer.dim() == 4 and buffer.is_floating_point() and not is_parameter


def _key_size(keys: Node) -> Any:
    value = example(keys)
    return None if value is None else str(value.shape[2])


def _called(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
