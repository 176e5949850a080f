"""Writing nodes into Dynamo's graph, with the fake tensors that describe what they compute."""

import logging
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from nestq.passes.graph_nodes import example, same_sizes
from nestq.passes.graph_writes import may_write

log = logging.getLogger("nestq.passes")

# What a node takes over from the one that it replaces: where in the model's code it comes from.
_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")
_CALLS = ("call_function", "call_method")


def insert_call(before: Node, function: Callable[..., Any], *args: Any) -> Node:
    """Insert a call in front of a node; it says that it comes from the same place in the model."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(function, args)
    node.meta = {key: before.meta[key] for key in _ORIGIN if key in before.meta}
    node.meta["example_value"] = _run(node, {})
    return node


def replaceable(node: Node, by: Tensor) -> bool:
    """Whether a node's users can take a tensor in its place that has other strides.

    They cannot where the graph returns it or its view, and where a view of it becomes impossible.
    """
    return _follow(node, by) is not None


def replace(node: Node, by: Node) -> None:
    """Give all users of a node another, of which they must be able to take the strides."""
    changed = _follow(node, by.meta["example_value"])
    assert changed is not None
    for user, value in changed.items():
        user.meta["example_value"] = value
    node.replace_all_uses_with(by)
    erase_unused([node])


def erase_unused(nodes: Sequence[Node]) -> None:
    """Erase nodes that nobody uses any more, and what only they used; placeholders stay."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.users or node.op in ("placeholder", "output") or node._erased:
            continue
        waiting += node.all_input_nodes
        node.graph.erase_node(node)


def _run(node: Node, values: dict[Node, Any]) -> Any:
    """What a node computes, on fake tensors."""

    def value_of(argument: Node) -> Any:
        return values.get(argument, argument.meta.get("example_value"))

    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _follow(node: Node, by: Tensor) -> dict[Node, Any] | None:
    """Users of a node, and theirs, of which a tensor with other strides changes the strides.

    Returns:
        What they compute instead; None if one of them cannot, or the graph returns it.
    """
    old = example(node)
    if old is None or not same_sizes(old.shape, by.shape):
        return None
    values: dict[Node, Any] = {node: by}
    waiting = [] if same_sizes(old.stride(), by.stride()) else sorted(node.users)
    while waiting:
        user = heappop(waiting)
        if user in values:
            continue
        if user.op not in _CALLS or any(may_write(user, one) for one in values):
            return None
        try:
            value = _run(user, values)
        except Exception as error:  # whatever a function of the model's code may raise
            log.debug("%s cannot take other strides: %s", user.format_node(), error)
            return None
        if _same_strides(user.meta.get("example_value"), value):
            continue
        if not isinstance(value, (Tensor, tuple, list)):
            return None  # strides themselves, which the model's code knows already
        values[user] = value
        for next_user in user.users:
            heappush(waiting, next_user)
    del values[node]
    return values


def _same_strides(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return same_sizes(old.stride(), new.stride())
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        return len(old) == len(new) and all(map(_same_strides, old, new))
    return bool(old == new)
