"""How transformers' RMSNorm looks in Dynamo's graph."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from nestq.passes.graph_nodes import argument, calls, example, operands, same_format


class RMSNorm(NamedTuple):
    """``weight * (wide * rsqrt(mean(wide ** 2) + eps)).to(x.dtype)`` with ``wide`` x in float32."""

    x: Node
    weight: Node
    eps: float
    nodes: tuple[Node, ...]
    """All calls, first to last; nothing else reads any but the last."""


def match_rms_norm(node: Node) -> RMSNorm | None:
    """The norm whose result a node is, all of it in the dtype of its input; None if it is none."""
    for weight, cast in both_orders(operands(node, "mul")):
        scaled, dtype = _cast(cast)
        for wide, inverse in both_orders(operands(scaled, "mul")):
            found = _match_inverse(inverse, wide)
            x, wide_dtype = _cast(wide)
            if found is None or x is None or wide_dtype != torch.float32:
                continue
            eps, between = found
            nodes: Any = (wide, *between, inverse, scaled, cast, node)
            if _is_in_dtype(node, x, weight, dtype) and _is_closed(nodes):
                return RMSNorm(x, weight, eps, nodes)
    return None


def both_orders(pair: tuple[Node, Node] | None) -> Iterator[tuple[Node, Node]]:
    """The operands of a commutative function in both orders; nothing for None."""
    if pair is not None:
        yield pair
        yield pair[1], pair[0]


def _cast(node: Any) -> tuple[Any, Any]:
    """The input and the dtype of ``x.to(dtype)`` or ``x.float()``; twice None if it is neither."""
    if calls(node, "float") and len(node.args) == 1:
        return node.args[0], torch.float32
    options = (*node.args[1:], *node.kwargs.values()) if calls(node, "to") else ()
    if len(options) == 1 and isinstance(options[0], torch.dtype):
        return argument(node, 0, "self"), options[0]
    return None, None


def _match_inverse(node: Node, wide: Node) -> tuple[float, tuple[Any, ...]] | None:
    """Epsilon, and the calls before ``torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)``."""
    shifted: Any = argument(node, 0, "input") if calls(node, "rsqrt") else None
    if not calls(shifted, "add") or len(shifted.args) != 2 or shifted.kwargs:
        return None
    mean, eps = shifted.args if isinstance(shifted.args[0], Node) else shifted.args[::-1]
    if not isinstance(eps, (int, float)) or not calls(mean, "mean"):
        return None
    dim = argument(mean, 1, "dim")
    over_columns = dim == -1 or (isinstance(dim, (tuple, list)) and list(dim) == [-1])
    if not over_columns or argument(mean, 2, "keepdim") is not True or "dtype" in mean.kwargs:
        return None
    squared = argument(mean, 0, "input")
    if not calls(squared, "pow") or argument(squared, 0, "input") is not wide:
        return None
    if argument(squared, 1, "exponent") != 2:
        return None
    return float(eps), (squared, mean, shifted)


def _is_in_dtype(node: Node, x: Node, weight: Node, cast_dtype: torch.dtype) -> bool:
    result, input, factor = example(node), example(x), example(weight)
    return (
        result is not None
        and input is not None
        and factor is not None
        and same_format(result, input)
        and (factor.dim(), factor.dtype, cast_dtype) == (1, input.dtype, input.dtype)
    )


def _is_closed(nodes: tuple[Node, ...]) -> bool:
    return all(user in nodes for node in nodes[:-1] for user in node.users)
