"""Which nodes of Dynamo's graph may write a tensor: it has in-place calls where the model has."""

import inspect
import operator
from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from nestq.passes.graph_nodes import argument

_WRITING_OPERATORS = {
    *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul),
    *(operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
}


def written_within(nodes: Iterable[Node]) -> bool:
    """Whether anything may be written between the first and the last of some nodes of a graph.

    If not, each of them computes the same anywhere between them.
    """
    ordered = sorted(nodes)
    node, last = ordered[0], ordered[-1]
    while node is not last:
        node = node.next
        if node is not last and may_write(node):
            return True
    return False


def may_write(node: Node, tensor: Node | None = None) -> bool:
    """Whether a call may write a tensor: any, or this one."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return node.op == "call_module"
    target: Any = node.target
    schema = getattr(getattr(target, "default", target), "_schema", None)
    if schema is not None:
        return any(
            parameter.alias_info is not None
            and parameter.alias_info.is_write
            and tensor in (None, argument(node, index, parameter.name))
            for index, parameter in enumerate(schema.arguments)
        )
    if target in _WRITING_OPERATORS or "out" in node.kwargs:
        return True
    if getattr(target, "__module__", None) == "_operator":  # ``and_`` writes nothing
        return False
    # A function of PyTorch that writes says so by its name or by an argument; of others, and of
    # those that call parts of the graph, nothing is known.
    module = getattr(target, "__module__", None) or "torch"
    known = module.split(".")[0] in ("torch", "_operator", "math", "builtins")
    if not known or module.startswith("torch.ops"):
        return True
    return target.__name__.endswith("_") or _in_place(node)


def _in_place(node: Node) -> bool:
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin, whose arguments are not known by name
        bound = node.kwargs
    return bool(bound.get("inplace", False))
