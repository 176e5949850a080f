"""Which calls may write a tensor."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from nestq.passes.graph_writes import may_write, written_within


def call(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
    graph = Graph()
    x = graph.placeholder("x")
    create = graph.call_method if isinstance(function, str) else graph.call_function
    return create(function, (x, *args), kwargs)


def unknown(x: Any) -> None:
    pass


@pytest.mark.parametrize(
    "node",
    [
        call("add_", 1),
        call(torch.relu_),
        call(torch.Tensor.mul_, 2),
        call(operator.iadd, 1),
        call(operator.ilshift, 1),
        call(operator.setitem, 0, 1),
        call(torch.add, 1, out=1),
        call(F.relu, True),
        call(F.dropout, 0.5, False, True),
        call(F.silu, inplace=True),
        call(torch.ops.aten.add_.Tensor, 1),
        call(torch.ops.nestq.kv_append),
        call(torch.ops.higher_order.cond),
        call(unknown),
    ],
    ids=str,
)
def test_what_may_write(node: Node) -> None:
    assert may_write(node)


@pytest.mark.parametrize(
    "node",
    [
        call("add", 1),
        call("__add__", 1),
        call(torch.cat),
        call(torch.sym_sum),
        call(torch.Tensor.mul, 2),
        call(operator.add, 1),
        call(operator.invert),
        call(operator.getitem, 0),
        call(F.relu, False),
        call(F.dropout, 0.5, False, False),
        call(F.scaled_dot_product_attention),
        call(torch.ops.aten.add.Tensor, 1),
        call(torch.ops.nestq.dual_plane_linear),
    ],
    ids=str,
)
def test_what_does_not(node: Node) -> None:
    assert not may_write(node)


def test_an_operator_writes_what_its_schema_says() -> None:
    graph = Graph()
    states, positions, *planes = (graph.placeholder(name) for name in "abcde")
    append = graph.call_function(torch.ops.nestq.kv_append, (states, positions, *planes))
    assert all(may_write(append, plane) for plane in planes)
    assert not may_write(append, states)


def test_only_what_lies_between_counts() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    writes = graph.call_method("add_", (x, 1))
    first = graph.call_method("neg", (x,))
    second = graph.call_method("neg", (x,))
    last = graph.call_method("add_", (x, 1))
    assert not written_within([first, second])
    assert not written_within([first, second, last])
    assert not written_within([writes, first])
    assert written_within([x, second])
    assert not written_within([first])
