"""How a module writes new keys or values into its buffer."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from nestq.passes.graph_nodes import argument, calls, example

# What an element of an index is where it takes a whole dimension.
_ALL = slice(None)


@dataclass(frozen=True)
class Update:
    """One write of new states into a buffer, at consecutive or given positions.

    Attributes:
        buffer: qualified name.
        node: that writes.
        node_of_buffer: that reads the attribute.
        states: new states, ``[B, H, n, D]`` or ``[B, n, H, D]``.
        states_transposed: whether the latter.
        layout: dimension of positions in the buffer: 2 for ``[B, H, S, D]``, 1 for
            ``[B, S, H, D]``.
        index: tensor of positions, ``[n]``, ``[B or 1, n]`` or ``[B or 1, 1, n]``; None for a
            slice.
        start: of a slice: a node or an int.
        stop: of a slice.
        count: n in the example.
        buffer_shape: of the buffer.
    """

    buffer: str
    node: Node
    node_of_buffer: Node
    states: Node
    states_transposed: bool
    layout: int
    index: Node | None
    start: Any
    stop: Any
    count: int
    buffer_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """``[B, H, S, D]``."""
        batch, heads, slots, size = self.buffer_shape
        return (batch, heads, slots, size) if self.layout == 2 else (batch, slots, heads, size)

    def canonical(self, buffer: Tensor) -> Tensor:
        """``[B, H, S, D]`` of a tensor like the buffer."""
        return buffer if self.layout == 2 else buffer.transpose(1, 2)

    def positions(self, value: Callable[[Any], Any]) -> Tensor:
        """int64 ``[B, n]`` for values of nodes."""
        batch = self.buffer_shape[0]
        if self.index is None:
            return torch.arange(value(self.start), value(self.stop)).expand(batch, -1)
        index = value(self.index)
        index = index[:, 0] if index.dim() == 3 else index
        return index.long().expand(batch, -1)


def match_update(name: str, buffer: Tensor, node: Node, value: Callable[[Any], Any]) -> Update:
    """What a node writes into a buffer.

    Args:
        name: of the buffer.
        buffer: four dimensions.
        node: that writes it, by ``index_copy_``, ``index_put_`` or an assignment.
        value: gives the value of a node for the example.

    Raises:
        ValueError: it does not write new states at positions of dimension 1 or 2, those of all
            rows, heads and channels; it names the buffer.
    """
    index, states = _index_and_states(name, node)
    new = example(states)
    if new is None or new.dim() != 4:
        shape = getattr(new, "shape", None)
        raise _no_update(name, node, f"writes states of shape {shape} and not of four dimensions")
    shape = [int(value_of_size(size)) for size in new.shape]
    for layout in (2, 1):
        position = index[layout]
        if isinstance(position, slice) and _is_whole(position, buffer.shape[layout]):
            continue
        if isinstance(position, slice) and position.step not in (None, 1):
            continue
        for transposed in (False, True):
            count = shape[1 if transposed else 2]
            is_slice = isinstance(position, slice)
            update = Update(
                buffer=name,
                node=node,
                node_of_buffer=node.all_input_nodes[0],
                states=states,
                states_transposed=transposed,
                layout=layout,
                index=None if is_slice else position,
                start=(position.start or 0) if is_slice else None,
                stop=_stop(position, buffer.shape[layout]) if is_slice else None,
                count=count,
                buffer_shape=tuple(buffer.shape),
            )
            if _does(update, buffer, [value(one) for one in index], shape, value):
                return update
    raise _no_update(
        name,
        node,
        f"does not write all of new keys or values {shape} at positions of dimension 1 or 2, which "
        "is what is supported: index_copy_, index_put_, or an assignment to positions or a slice",
    )


def _index_and_states(name: str, node: Node) -> tuple[list[Any], Any]:
    """What is indexed in each of the four dimensions, and what is written there."""
    if calls(node, "index_copy_"):
        dim = argument(node, 1, "dim")
        index: list[Any] = [_ALL] * 4
        index[dim] = argument(node, 2, "index")
        return index, argument(node, 3, "source")
    if calls(node, "index_put_") and not argument(node, 3, "accumulate", False):
        indices = argument(node, 1, "indices")
        return _four(name, node, [_ALL if i is None else i for i in indices]), node.args[2]
    if node.op == "call_function" and node.target is operator.setitem:
        given: Any = node.args[1]
        given = list(given) if isinstance(given, (tuple, list)) else [given]
        return _four(name, node, given), node.args[2]
    raise _no_update(name, node, "is none of index_copy_, index_put_ and an assignment")


def _four(name: str, node: Node, index: Sequence[Any]) -> list[Any]:
    """An index with an element for each dimension."""
    index = list(index)
    if index.count(Ellipsis) == 1:
        at = index.index(Ellipsis)
        index[at : at + 1] = [_ALL] * (5 - len(index))
    index += [_ALL] * (4 - len(index))
    if len(index) != 4 or any(i is None or i is Ellipsis for i in index):
        raise _no_update(name, node, f"has the index {index}")
    return index


def _is_whole(position: slice, size: int) -> bool:
    return position.start in (None, 0) and position.stop in (None, size)


def _stop(position: slice, size: int) -> Any:
    return size if position.stop is None else position.stop


def _does(
    update: Update,
    buffer: Tensor,
    index: Sequence[Any],
    shape: Sequence[int],
    value: Callable[[Any], Any],
) -> bool:
    """Whether writing random numbers does what such an update is to do."""
    batch, heads, _, size = update.shape
    wanted = [batch, heads, update.count, size]
    if update.states_transposed:
        wanted[1], wanted[2] = wanted[2], wanted[1]
    if wanted != list(shape):
        return False
    if update.index is not None:
        positions = value(update.index)
        if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
            return False
        row = (1, batch)
        shapes = [(update.count,), *((b, update.count) for b in row)]
        shapes += [(b, 1, update.count) for b in row]
        if tuple(positions.shape) not in shapes:
            return False
    positions = update.positions(value)
    if positions.shape[1] != update.count:
        return False
    written = torch.zeros(update.buffer_shape)
    states = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(*shape)
    try:
        written[tuple(one.cpu() if isinstance(one, Tensor) else one for one in index)] = states
    except (RuntimeError, IndexError):
        return False
    expected = torch.zeros(update.shape)
    new = states.transpose(1, 2) if update.states_transposed else states
    at = positions.cpu()[:, None, :, None].expand(new.shape)
    return torch.equal(update.canonical(written), expected.scatter(2, at, new))


def value_of_size(size: Any) -> int:
    """What a size is in the example."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _no_update(name: str, node: Node, found: str) -> ValueError:
    called = getattr(node.target, "__name__", str(node.target))
    return no_cache(name, f"{called} {found}")


def no_cache(name: str, found: str) -> ValueError:
    """The error that says what was found of a buffer."""
    return ValueError(
        f"the buffer {name!r} is no cache of keys or values that can be nested: {found}"
    )
