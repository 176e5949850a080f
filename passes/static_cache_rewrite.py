"""Writing nested planes, and attention over them, into a graph in place of dense caches."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from nestq.kv_policy import KVRead
from nestq.passes.captured_call import CapturedCall
from nestq.passes.graph_edits import erase_unused, insert_call, replace, replaceable
from nestq.passes.graph_nodes import argument, calls_operator, example, operator_arguments
from nestq.passes.static_cache import Read
from nestq.passes.static_cache_update import Update

# Names of planes behind that of the buffer.
PLANES = ("base", "refinement", "scale")


def rewrite(call: CapturedCall, reads: Sequence[Read], planes: Mapping[str, Tensor]) -> None:
    """Replace updates by ``kv_append`` and attention by ``nested_attention``, in place.

    Args:
        call: whose graph is rewritten.
        reads: what was found in it.
        planes: by qualified name, those of the buffer ``x`` as ``x_base`` and so on.
    """
    nodes = {name: call.add_attribute(name, plane) for name, plane in planes.items()}
    updates = sorted(
        (one for read in reads for one in (read.keys, read.values)), key=lambda one: one.node
    )
    positions: dict[Any, Node] = {}
    with call.fake_mode, torch.no_grad():
        for update in updates:
            key = update.index, update.start, update.stop
            if key not in positions:
                positions[key] = _positions(update)
            _append(update, positions[key], _planes(update, nodes))
        for read in reads:
            key = read.keys.index, read.keys.start, read.keys.stop
            _attend(read, positions[key], nodes)


def _planes(update: Update, nodes: Mapping[str, Node]) -> list[Node]:
    return [nodes[f"{update.buffer}_{name}"] for name in PLANES]


def _positions(update: Update) -> Node:
    """int64 ``[B, n]``, in front of an update."""
    before, batch = update.node, update.buffer_shape[0]
    if update.index is None:
        device = update.node_of_buffer.meta["example_value"].device
        line = insert_call(before, _span, update.start, update.stop, device)
        return insert_call(before, Tensor.expand, line, batch, -1)
    index = update.index
    value = example(index)
    assert value is not None
    if value.dim() == 3:
        index = insert_call(before, Tensor.select, index, 1, 0)
    if value.dtype != torch.int64:
        index = insert_call(before, Tensor.long, index)
    return insert_call(before, Tensor.expand, index, batch, -1)


def _span(start: int, stop: int, device: torch.device) -> Tensor:
    """Positions of a slice."""
    return torch.arange(start, stop, device=device)


def _append(update: Update, positions: Node, planes: Sequence[Node]) -> None:
    node, states = update.node, update.states
    if update.states_transposed:
        states = insert_call(node, Tensor.transpose, states, 1, 2)
    insert_call(node, torch.ops.nestq.kv_append.default, states, positions, *planes)
    # What it returns is the buffer.
    node.replace_all_uses_with(update.node_of_buffer)
    node.graph.erase_node(node)


def _attend(read: Read, positions: Node, nodes: Mapping[str, Node]) -> None:
    node = read.attention
    query = argument(node, 0, "query")
    planes = [*_planes(read.keys, nodes), *_planes(read.values, nodes)]
    options = read.scaling, read.window, 0
    operator = torch.ops.nestq.nested_attention.default
    out = insert_call(node, operator, query, positions, *planes, *options)
    if not replaceable(node, out.meta["example_value"]):
        out = insert_call(node, Tensor.contiguous, out)
    used = [one for one in node.all_input_nodes if one is not query]
    if replaceable(node, out.meta["example_value"]):
        replace(node, out)
    else:
        node.replace_all_uses_with(out)
        node.graph.erase_node(node)
    erase_unused(used)


def reading(graph: Graph, read: KVRead) -> Graph:
    """A copy of a rewritten graph that reads as a draft does."""
    draft = copy.deepcopy(graph)
    for node in draft.nodes:
        if calls_operator(node, "nested_attention"):
            arguments = operator_arguments(node) | {"recent": read.recent}
            if not read.refinement:
                arguments |= {"key_refinement": None, "value_refinement": None}
            node.args, node.kwargs = tuple(arguments.values()), {}
    return draft


def as_function(graph: Graph) -> tuple[GraphModule, list[str]]:
    """A graph as a module, and the names of the attributes that are its first inputs."""
    names = []
    for node in graph.find_nodes(op="placeholder"):
        name = node.meta.get("attribute")
        if name is not None and not node.users:
            graph.erase_node(node)
        elif name is not None:
            names.append(name)
    graph.lint()
    return GraphModule(nn.Module(), graph), names
