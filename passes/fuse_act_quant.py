"""What comes just before a linear joins it, so that one kernel also quantizes the result."""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from nestq.passes.graph_edits import erase_unused, insert_call, replace, replaceable
from nestq.passes.graph_nodes import (
    argument,
    calls,
    calls_operator,
    example,
    operands,
    operator_arguments,
    same_format,
)
from nestq.passes.graph_pass import GraphPass
from nestq.passes.graph_writes import written_within
from nestq.passes.merge_linears import fused_linear_arguments
from nestq.passes.rms_norm import RMSNorm, both_orders, match_rms_norm


class FuseActQuant(GraphPass):
    """RMSNorm, with the residual sum before it, and gating by SiLU move into ``fused_linear``.

    Before::

        total = x + residual
        wide = total.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        normed = norm_weight * (wide * scale).to(total.dtype)
        out = fused_linear(normed, None, None, 0.0, None, ...)[0]
        ... = dual_plane_linear(F.silu(gate) * up, ...)

    After::

        fused = fused_linear(x, residual, norm_weight, eps, None, ...)
        out, total = fused[0], fused[1]
        ... = fused_linear(up, None, None, 0.0, gate, ...)[0]

    Rows may be selected between a norm and a linear, as in front of the head: ``x`` and
    ``residual`` are selected instead. Left alone are a value that something else reads too, a sum
    that something reads before the linear does, dtypes that change on the way, and what autograd
    follows.
    """

    name = "fuse_act_quant"

    def __call__(self, graph: Graph) -> int:
        linears = ("dual_plane_linear", "fused_linear")
        found = [n for n in graph.nodes if any(calls_operator(n, name) for name in linears)]
        return sum(_fuse(linear) for linear in found)


def _fuse(linear: Node) -> int:
    """Fuse what comes before a linear: 1 if that is possible, else 0."""
    arguments = _plain_arguments(linear)
    if arguments is None:
        return 0
    value = example(arguments["x"])
    if value is None or value.requires_grad or len(arguments["x"].users) > 1:
        return 0
    return _fuse_gate(linear, arguments) or _fuse_norm(linear, arguments)


def _plain_arguments(linear: Node) -> dict[str, Any] | None:
    """Arguments of ``fused_linear`` for a linear with nothing before it yet."""
    if calls_operator(linear, "dual_plane_linear"):
        return fused_linear_arguments([linear])
    arguments = operator_arguments(linear)
    taken = [arguments[name] for name in ("residual", "norm_weight", "gate")]
    return arguments if taken == [None] * 3 else None


def _fuse_gate(linear: Node, arguments: dict[str, Any]) -> int:
    for silu, up in both_orders(operands(arguments["x"], "mul")):
        gate = _gate(silu)
        if gate is None or not same_format(gate.meta["example_value"], up.meta["example_value"]):
            continue
        if len(silu.users) > 1 or written_within([silu, linear]):
            continue
        _put(linear, arguments | {"x": up, "gate": gate})
        return 1
    return 0


def _gate(silu: Node) -> Node | None:
    """The input of a ``silu`` that is not in place."""
    if not calls(silu, "silu") or argument(silu, 1, "inplace", False):
        return None
    gate = argument(silu, 0, "input")
    return None if example(gate) is None else gate


def _fuse_norm(linear: Node, arguments: dict[str, Any]) -> int:
    normed, index = _selected_rows(arguments["x"])
    norm = match_rms_norm(normed)
    if norm is None or len(normed.users) > 1 or written_within([norm.nodes[0], linear]):
        return 0
    sum_of_two = _residual_sum(norm, index, linear)
    x, residual = sum_of_two or (norm.x, None)
    if index is not None:
        x = insert_call(linear, operator.getitem, x, index)
        residual = residual and insert_call(linear, operator.getitem, residual, index)
    read_later = len(norm.x.users) > 1
    start = {"x": x, "residual": residual, "norm_weight": norm.weight, "eps": norm.eps}
    fused = _put(linear, arguments | start)
    if sum_of_two is not None and read_later:
        replace(norm.x, insert_call(fused.next, operator.getitem, fused, 1))
    return 1


def _selected_rows(node: Node) -> tuple[Node, Any]:
    """The tensor of which a node selects rows, and the index; the node and None if it does not."""
    index = argument(node, 1, "index") if calls(node, "getitem") else None
    if not isinstance(index, tuple) or not all(isinstance(one, slice) for one in index):
        return node, None
    whole = argument(node, 0, "self")
    columns_are_whole = len(index) < node.meta["example_value"].dim() or index[-1] == slice(None)
    return (whole, index) if columns_are_whole else (node, None)


def _residual_sum(norm: RMSNorm, index: Any, linear: Node) -> tuple[Node, Node] | None:
    """Both terms of the sum that is normed, if it can come out of the linear."""
    terms = operands(norm.x, "add")
    total = norm.x.meta["example_value"]
    if terms is None or not all(same_format(one.meta["example_value"], total) for one in terms):
        return None
    others = [user for user in norm.x.users if user is not norm.nodes[0]]
    if others and (index is not None or min(others) < linear):
        return None
    if not replaceable(norm.x, total.new_empty(total.shape)):
        return None
    return None if written_within([norm.x, linear]) else terms


def _put(linear: Node, arguments: dict[str, Any]) -> Node:
    """Put a ``fused_linear`` in the place of a linear, and erase what only that one read."""
    fused = insert_call(linear, torch.ops.nestq.fused_linear, *arguments.values())
    if calls_operator(linear, "fused_linear"):
        linear.replace_all_uses_with(fused)
        erase_unused([linear])
    else:
        replace(linear, insert_call(linear, operator.getitem, fused, 0))
    return fused
