"""Views under ``torch.compile``: right after any toggling, and never compiled again.

The check is run on an unguarded implementation too, which must fail it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nested_tensors import random
from torch import Tensor, nn
from torchao.utils import TorchAOBaseTensor

from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

BACKENDS = ("aot_eager", "inductor")
TOGGLES = ("draft", "target", "target", "draft", "draft", "target")


class Block(nn.Module):
    """Nested and dense layers; ReLU is exact, so that compiled and eager bits must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dense = nn.Linear(48, 100), nn.Linear(100, 48), nn.Linear(48, 48)
        for seed, linear in enumerate((self.up, self.down)):
            weight = NestedQuantTensor.from_hp(random(*linear.weight.shape, seed=seed), 32)
            linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.down(F.relu(self.up(x))))


# A module global read while the subclass dispatches: what must not be done.
_unguarded_view = "target"


@contextmanager
def unguarded_view(view: str) -> Iterator[None]:
    global _unguarded_view
    previous, _unguarded_view = _unguarded_view, view
    try:
        yield
    finally:
        _unguarded_view = previous


class UnguardedTensor(TorchAOBaseTensor):
    """Two dense weights of which a module global picks one in ``__torch_dispatch__``."""

    tensor_data_names = ["draft", "target"]
    tensor_attribute_names = []

    @staticmethod
    def __new__(cls: type, draft: Tensor, target: Tensor) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, draft.shape, dtype=draft.dtype)
        self.draft, self.target = draft, target
        return self

    def __init__(self, draft: Tensor, target: Tensor) -> None:
        super().__init__()


@UnguardedTensor.implements(torch.ops.aten.t.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return UnguardedTensor(args[0].draft.t(), args[0].target.t())


@UnguardedTensor.implements(torch.ops.aten.mm.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] @ getattr(args[1], _unguarded_view)


class UnguardedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = UnguardedTensor(random(4, 48), random(4, 48, seed=1))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@torch.no_grad()
def wrong_calls(
    module: nn.Module, view: Callable[[Any], AbstractContextManager[Any]], backend: str
) -> list[str]:
    """Views in which a compiled module, toggled after warm-up, does not give the eager bits.

    Raises:
        torch._dynamo.exc.RecompileError: it was compiled again after one call in each view.
    """
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = random(2, 48)
    for name in ("draft", "target"):
        with view(name):
            compiled(x)
    wrong = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, name in enumerate(TOGGLES * 2):
            x = random(2, 48, seed=seed)
            with view(name):
                if not torch.equal(compiled(x), module(x)):
                    wrong.append(name)
    return wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_views_are_right_and_never_recompile(backend: str) -> None:
    assert wrong_calls(Block(), nest_view, backend) == []


def test_the_check_fails_on_an_unguarded_view() -> None:
    block, x = UnguardedBlock(), random(2, 48)
    with unguarded_view("draft"):
        draft = block(x)
    assert not torch.equal(draft, block(x))  # it works in eager mode
    assert "target" in wrong_calls(block, unguarded_view, "aot_eager")


@torch.no_grad()
def test_one_graph_a_view() -> None:
    """With the operators on plain planes, as passes match them, and only the planes it reads."""
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    block, x = Block(), random(2, 48)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for name in TOGGLES:
        with nest_view(name):
            compiled(x)
    assert len(graphs) == 2
    for graph, reads_refinement in zip(graphs, (False, True), strict=True):
        nodes = graph.graph.nodes
        called = [node.target for node in nodes if node.op == "call_function"]
        assert called.count(torch.ops.nestq.dual_plane_linear) == 2
        assert called.count(torch.ops.nestq.linear_16) == 1
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        assert any("refinement" in name for name in inputs) == reads_refinement
    compiled(x)  # outside of any view: the target, with a graph of its own
    assert len(graphs) == 3


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_outside_of_views_compiled_is_the_target(backend: str) -> None:
    torch.compiler.reset()
    block, x = Block(), random(2, 48)
    block.dense = nn.Identity()  # without a view a dense layer is torch's own, and may be fused
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with nest_view("target"):
        expected = block(x)
    with nest_view("draft"):
        compiled(x)
    with nullcontext():
        assert torch.equal(compiled(x), expected)


@torch.no_grad()
def test_compiled_draft_runs_without_a_refinement() -> None:
    torch.compiler.reset()
    block, x = Block(), random(2, 48)
    with nest_view("draft"):
        expected = block(x)
        for linear in (block.up, block.down):
            linear.weight.refinement = None
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
    with pytest.raises(Exception, match="only the base plane is loaded"):
        compiled(x)
