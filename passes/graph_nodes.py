"""Reading nodes of Dynamo's graph, whatever way the model's code spells a function."""

import operator
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true


@cache
def _spellings(name: str) -> tuple[Any, ...]:
    owners = (torch, Tensor, F, operator)
    return tuple(getattr(owner, name) for owner in owners if hasattr(owner, name))


def calls(node: Any, name: str) -> bool:
    """Whether a node is ``x.name(...)``, ``torch.name(x, ...)`` or the like, not in place."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_method":
        return node.target == name
    return node.op == "call_function" and node.target in _spellings(name)


def calls_operator(node: Any, name: str) -> bool:
    """Whether a node calls ``torch.ops.nestq.name``."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    packet = getattr(torch.ops.nestq, name)
    return node.target in (packet, packet.default)


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def operator_arguments(node: Node) -> dict[str, Any]:
    """All arguments of a call of an operator by name, in the order of its schema."""
    target: Any = node.target
    schema = getattr(target, "default", target)._schema
    return {
        parameter.name: argument(node, index, parameter.name, parameter.default_value)
        for index, parameter in enumerate(schema.arguments)
    }


def operands(node: Any, name: str) -> tuple[Node, Node] | None:
    """Both operands of a function of two tensors, without options; None if it is anything else."""
    if not calls(node, name) or len(node.args) > 2 or set(node.kwargs) - {"input", "other"}:
        return None
    one, other = argument(node, 0, "input"), argument(node, 1, "other")
    if example(one) is None or example(other) is None:
        return None
    return one, other


def example(node: Any) -> Tensor | None:
    """A fake tensor with the shape, strides and dtype of a node; None where they are not known."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def same_sizes(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two shapes are equal whatever their symbols stand for."""
    one, other = tuple(one), tuple(other)
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def same_format(one: Tensor, other: Tensor) -> bool:
    """Whether shapes, dtypes and devices are equal."""
    kinds = (one.dtype, one.device), (other.dtype, other.device)
    return kinds[0] == kinds[1] and same_sizes(one.shape, other.shape)
