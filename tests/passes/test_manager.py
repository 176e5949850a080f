"""All passes together: on models, off by name, beside the user's own, and in torch's caches."""

import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import small_models
import torch
import torch.nn.functional as F
from nested_models import nest_
from nested_tensors import random
from rewriting import Rewriting, weights
from test_attention import span, step
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.fx import Graph, symbolic_trace

from nestq.kv_cache import NestedKVCache
from nestq.passes.manager import PassManager, disabled, install, run_passes
from nestq.plane_placement import place_side_by_side_
from nestq.view import nest_view

Q, K = weights(2)
(Q_AFTER,), (K_AFTER,) = weights(1, columns=24), weights(1, columns=32)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with config.patch(pre_grad_custom_pass=None):
        yield


def expected(family: str, layers: int) -> dict[str, int]:
    """Matches in a model whose head is nested."""
    if family == "gemma2":  # another norm, another activation
        return {"merge_linears": 2 * layers, "fuse_act_quant": 0, "nested_kv": layers}
    merged = 0 if family == "phi3" else 2 * layers  # its linears are one already
    # Both norms and the gate of a layer, and the norm in front of the head.
    return {"merge_linears": merged, "fuse_act_quant": 3 * layers + 1, "nested_kv": layers}


def assert_same_as_eager(model: Any, view: str) -> Rewriting:
    """Blocks of 5 rows, as verification has them, and of 1 row, as drafting."""
    backend = Rewriting()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours, theirs = (NestedKVCache(model.config, 9, batch_size=2, policy="kv4/kv8") for _ in "ab")
    ids, positions = small_models.tokens(model, 2, 6), span(2, 0, 6) - torch.tensor([[0], [2]])
    for block in (slice(0, 5), slice(5, 6)):
        arguments = ids[:, block], positions[:, block].contiguous(), view
        assert torch.equal(step(compiled, ours, *arguments), step(model, theirs, *arguments))
    return backend


def build(family: str, **options: Any) -> Any:
    if family == "gemma2":
        # Its own activation has other bits in a compiled graph; soft caps are not supported.
        options |= {"attn_logit_softcapping": None, "hidden_activation": "relu"}
    return nest_(small_models.build(family, **options))


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral", "qwen2", "qwen3", "phi3", "gemma2"])
def test_every_layer_matches_and_computes_the_same(family: str, view: str) -> None:
    backend = assert_same_as_eager(build(family, num_hidden_layers=1), view)
    assert backend.matches == [expected(family, 1)] * 2
    if family != "gemma2":
        assert len(backend.calls("dual_plane_linear")) == 1  # attention's output


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2"])
def test_several_layers_in_16_bits_with_planes_side_by_side(family: str) -> None:
    model = build(family, dtype=torch.bfloat16)
    assert place_side_by_side_(model) == 4
    backend = assert_same_as_eager(model, "target")
    assert backend.matches == [expected(family, 2)] * 2
    # The sums of the residual stream come out of linears, but for that of the head.
    fused = backend.calls("fused_linear")
    assert [len(fused), sum(one.args[1] is not None for one in fused)] == [7, 4]


def test_a_head_that_is_not_nested_keeps_its_norm() -> None:
    model = nest_(small_models.build("llama-gqa", num_hidden_layers=1), head=False)
    torch_model = torch.compile(model, backend=(backend := Rewriting()), fullgraph=True)
    with nest_view("target"), torch.no_grad():
        torch_model(small_models.tokens(model, 1, 3), use_cache=False)
    assert backend.matches[0]["fuse_act_quant"] == expected("llama-gqa", 1)["fuse_act_quant"] - 1


def both(x: Tensor) -> tuple[Tensor, ...]:
    """Two linears to merge, and nothing for which Inductor would call a C++ compiler."""
    return F.linear(F.linear(x, Q), Q_AFTER), F.linear(F.linear(x, K), K_AFTER)


def graph_of_both() -> Graph:
    """As Dynamo makes it, before any pass."""
    torch._dynamo.reset()
    graphs: list[Graph] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    with nest_view("target"):
        torch.compile(both, backend=keep)(random(2, 48))
    return graphs[0]


def test_a_graph_without_our_operators_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nestq.passes")
    module = symbolic_trace(lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1) * x)
    before = str(module.graph)
    assert run_passes(module.graph) == {}
    assert str(module.graph) == before
    assert not caplog.records


def test_passes_can_be_switched_off_by_name() -> None:
    with disabled("merge_linears"), disabled("nested_kv"):
        assert run_passes(graph_of_both()) == {"fuse_act_quant": 0}
    with disabled():
        graph = graph_of_both()
        before = str(graph)
        assert run_passes(graph) == {}
        assert str(graph) == before
    assert run_passes(graph_of_both())["merge_linears"] == 1
    message = r"names must be some of \['fuse_act_quant', .*\], got \['fuse'\]"
    with pytest.raises(ValueError, match=message), disabled("merge_linears", "fuse"):
        pass


def test_a_line_for_each_graph_says_what_matched(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nestq.passes")
    run_passes(graph_of_both())
    assert caplog.messages == ["merge_linears: 1, fuse_act_quant: 0, nested_kv: 0"]


class OwnPass(CustomGraphPass):
    """A user's pass."""

    def __init__(self, name: str = "own") -> None:
        self.name = name
        self.targets: list[Any] = []

    def __call__(self, graph: Graph) -> None:
        self.targets += [node.target for node in graph.nodes]

    def uuid(self) -> str:
        return self.name


def test_it_is_installed_once_in_each_thread_that_makes_a_view() -> None:
    installed = []

    def look() -> None:
        nest_view("draft")
        installed.append(config.pre_grad_custom_pass)

    look()
    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert all(isinstance(one, PassManager) for one in installed)
    assert installed[0] is installed[1]
    assert installed[0].users is None


def test_a_users_pass_runs_too_and_first() -> None:
    early, late = OwnPass("early"), OwnPass("late")
    for users in (early, late):
        config.pre_grad_custom_pass = users
        install()
        graph = graph_of_both()
        config.pre_grad_custom_pass(graph)
        assert torch.ops.nestq.dual_plane_linear in users.targets
        assert torch.ops.nestq.fused_linear not in users.targets
        assert torch.ops.nestq.fused_linear in [node.target for node in graph.nodes]
    assert early.targets == late.targets


def test_a_list_that_has_it_is_left_alone() -> None:
    own = OwnPass()
    passes = [own, PassManager()]
    config.pre_grad_custom_pass = passes
    install()
    assert config.pre_grad_custom_pass == passes
    config.pre_grad_custom_pass = [own]
    install()
    config.pre_grad_custom_pass(graph_of_both())
    assert own.targets


def test_its_id_depends_on_what_runs() -> None:
    plain = PassManager().uuid()
    assert plain == PassManager().uuid()
    with disabled("nested_kv"):
        without = PassManager().uuid()
    others = [without, PassManager(OwnPass()).uuid(), PassManager([OwnPass(), OwnPass()]).uuid()]
    assert len({plain, *others}) == 4
    assert PassManager(lambda graph: None).uuid() is None
    pickle.dumps((plain, others, PassManager(OwnPass())))


def test_inductor_runs_it_and_caches_keep_graphs_of_other_passes_apart() -> None:
    own = OwnPass()
    config.pre_grad_custom_pass = own
    x = random(2, 48)
    with nest_view("target"):
        eager = both(x)

    def compile_anew() -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        with nest_view("target"):
            assert all(map(torch.equal, torch.compile(both)(x), eager))
        cache = counters["aot_autograd"]
        return cache["autograd_cache_miss"], cache["autograd_cache_hit"]

    with fresh_cache(), config.patch(fx_graph_cache=True):
        assert compile_anew() == (1, 0)
        assert own.targets.count(torch.ops.nestq.dual_plane_linear) == 4
        assert compile_anew() == (0, 1)
        with disabled():
            assert compile_anew() == (1, 0)
