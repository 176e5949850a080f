"""What parts of a graph compute for given inputs: to know a pattern by what it does.

A model's code can spell a mask, or the repetition of heads, in more ways than can be listed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from nestq.passes.graph_nodes import calls
from nestq.passes.graph_writes import may_write

_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_size)


def is_size(node: Node) -> bool:
    """Whether a node reads the shape of a tensor, and no number in it."""
    return (node.op == "call_function" and node.target in _SIZES) or calls(node, "size")


def sources(node: Any, sizes: bool = False) -> set[Node]:
    """All nodes whose values a node depends on, itself included.

    Args:
        node: of a graph; anything else depends on none.
        sizes: whether those of which only shapes are read count, too.
    """
    found: set[Node] = set()
    waiting = [node] if isinstance(node, Node) else []
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            if sizes or not is_size(one):
                waiting += one.all_input_nodes
    return found


def spelled(node: Any) -> str:
    """What a node computes, as text that is the same for all nodes that compute it."""
    if not isinstance(node, Node):
        return repr(node)
    if node.op == "placeholder":
        return node.name
    args = map_arg((node.args, node.kwargs), lambda one: _Text(spelled(one)))
    return f"{node.op} {node.target} {args!r}"


class _Text(str):
    """Text that stands for itself inside other text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"({self})"


def evaluate(node: Any, known: Mapping[Node, Any], memory: dict[Node, Any]) -> Any:
    """The value of a node.

    Args:
        node: of a graph; anything else is its own value.
        known: values of nodes that are not computed: all placeholders that it depends on.
        memory: gets the values of all nodes on the way; give it to the next call with the same
            ``known``.
    """
    if not isinstance(node, Node):
        return map_arg(node, lambda one: evaluate(one, known, memory))
    for one in sorted(sources(node, sizes=True)):
        if one in memory:
            continue
        if one in known:
            memory[one] = known[one]
        else:
            memory[one] = _call(one, memory)
    return memory[node]


def _call(node: Node, memory: Mapping[Node, Any]) -> Any:
    args = map_arg(node.args, memory.__getitem__)
    kwargs = map_arg(node.kwargs, memory.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def writes(graph: Graph) -> list[Node]:
    """All nodes of a graph that may write a tensor, in its order."""
    return [node for node in graph.nodes if node.op.startswith("call") and may_write(node)]


def written_in_place(among: Iterable[Node], allowed: Iterable[Node], graph: Graph) -> Node | None:
    """A node, none of the allowed ones, that may write a tensor that is among some nodes."""
    allowed, among = set(allowed), set(among)
    storages = {storage for storage in map(_storage, among) if storage is not None}
    for node in writes(graph):
        if node in allowed:
            continue
        # Methods and assignments write the first of their arguments; of others nothing is known.
        target = node.args[0] if node.args else None
        if node in among or not isinstance(target, Node):
            return node
        if _storage(target) in storages or _viewed(target) in among:
            return node
    return None


def _storage(node: Node) -> Any:
    """What is equal for a tensor and its views inside a graph."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _viewed(node: Node) -> Node:
    """The input or attribute that a node may be a view of, or the node."""
    dtype = getattr(node.meta.get("example_value"), "dtype", None)
    while node.op.startswith("call") and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        if getattr(node.meta.get("example_value"), "dtype", None) != dtype:
            break
    return node
