"""Linears that read one input become one call."""

import operator
from collections import defaultdict
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Graph, Node

from nestq.passes.graph_edits import erase_unused, insert_call, replace, replaceable
from nestq.passes.graph_nodes import calls_operator, example, operator_arguments
from nestq.passes.graph_pass import GraphPass
from nestq.passes.graph_writes import written_within


class MergeLinears(GraphPass):
    """Calls of ``dual_plane_linear`` on one tensor become a ``fused_linear`` and its columns.

    Before::

        query = dual_plane_linear(x, base_q, refinement_q, scale_q, unit_q, bias_q, 64, 8)
        key = dual_plane_linear(x, base_k, refinement_k, scale_k, unit_k, bias_k, 64, 8)

    After::

        fused = fused_linear(
            x, None, None, 0.0, None, [base_q, base_k], [refinement_q, refinement_k],
            [scale_q, scale_k], [unit_q, unit_k], [bias_q, bias_k], 64, 8,
        )
        out = fused[0]
        query = out[..., :rows_q]
        key = out[..., rows_q:]

    The input is then quantized once, and one kernel multiplies it by all weights if their planes
    are neighbours (``nestq.plane_placement``). Not merged are linears between which something may
    be written, and those whose users cannot take columns of a wider tensor.
    """

    name = "merge_linears"

    def __call__(self, graph: Graph) -> int:
        groups: dict[Any, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if calls_operator(node, "dual_plane_linear"):
                groups[_what_they_share(node)].append(node)
        return sum(_merge(linears) for linears in groups.values() if len(linears) > 1)


def _what_they_share(linear: Node) -> tuple[Any, ...]:
    given = operator_arguments(linear)
    return (
        given["x"],
        given["refinement"] is None,
        given["unit"] is None,
        given["group_size"],
        given["overlap"],
    )


def _merge(linears: list[Node]) -> int:
    """Merge linears in the place of the first: 1 if that is possible, else 0."""
    first = linears[0]
    rows = [_rows(linear) for linear in linears]
    arguments = [one for linear in linears for one in linear.all_input_nodes]
    if not all(isinstance(n, int) for n in rows) or not all(one < first for one in arguments):
        return 0
    if written_within(linears):
        return 0
    fused = insert_call(
        first, torch.ops.nestq.fused_linear, *fused_linear_arguments(linears).values()
    )
    out = insert_call(first, operator.getitem, fused, 0)
    ends = list(accumulate(rows))
    columns = [
        insert_call(first, operator.getitem, out, (Ellipsis, slice(end - n, end)))
        for n, end in zip(rows, ends, strict=True)
    ]
    pairs = list(zip(linears, columns, strict=True))
    if not all(replaceable(linear, part.meta["example_value"]) for linear, part in pairs):
        erase_unused(columns)
        return 0
    for linear, part in pairs:
        replace(linear, part)
    return 1


def _rows(linear: Node) -> Any:
    result = example(linear)
    return None if result is None else result.shape[-1]


def fused_linear_arguments(linears: list[Node]) -> dict[str, Any]:
    """Arguments of one ``fused_linear`` in place of some ``dual_plane_linear``."""
    given = [operator_arguments(linear) for linear in linears]

    def together(name: str) -> list[Any]:
        return [one[name] for one in given]

    def together_if_any(name: str) -> list[Any]:
        return [] if given[0][name] is None else together(name)

    return {
        "x": given[0]["x"],
        "residual": None,
        "norm_weight": None,
        "eps": 0.0,
        "gate": None,
        "bases": together("base"),
        "refinements": together_if_any("refinement"),
        "scales": together("scale"),
        "units": together_if_any("unit"),
        "biases": together("bias"),
        "group_size": given[0]["group_size"],
        "overlap": given[0]["overlap"],
    }
