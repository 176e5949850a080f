"""Graphs of Dynamo, rewritten and run as they stand."""

from collections.abc import Callable
from typing import Any

import torch
from nested_tensors import random
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from nestq.passes.manager import run_passes
from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

OPS = torch.ops.nestq


class Rewriting:
    """A backend for torch.compile that rewrites a graph and runs it, node by node.

    Attributes:
        matches: of each pass, for each graph.
        graphs: after the passes.
    """

    def __init__(self) -> None:
        self.matches: list[dict[str, int]] = []
        self.graphs: list[Graph] = []

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.matches.append(run_passes(module.graph))
        self.graphs.append(module.graph)
        module.graph.lint()
        module.recompile()
        return module.forward

    def calls(self, name: str) -> list[Node]:
        """Calls of an operator in the last graph."""
        return [node for node in self.graphs[-1].nodes if node.target is getattr(OPS, name)]


def rewritten(function: Callable[..., Any], *args: Any) -> Rewriting:
    """Rewrite the one graph of a function and check its results and strides against eager mode."""
    torch._dynamo.reset()
    backend = Rewriting()
    with nest_view("target"):
        ours = torch.compile(function, backend=backend, fullgraph=True)(*_fresh(args))
        theirs = function(*_fresh(args))
    for one, other in zip(_as_tuple(ours), _as_tuple(theirs), strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)
    assert len(backend.graphs) == 1
    return backend


def _fresh(args: tuple[Any, ...]) -> list[Any]:
    """The same arguments, of which a function may write the tensors."""
    return [one.clone() if type(one) is Tensor else one for one in args]


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def weights(count: int, rows: int = 24, columns: int = 48) -> list[NestedQuantTensor]:
    """Different weights for one input."""
    made = [random(rows + 8 * i, columns, seed=i + 1) for i in range(count)]
    return [NestedQuantTensor.from_hp(one, 32, 8) for one in made]
