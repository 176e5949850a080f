"""The attention implementation "nestq" inside transformers models, eager and compiled."""

from typing import Any

import pytest
import small_models
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from transformers import PreTrainedModel

from nestq.attention import nested_attention_forward, nested_attention_implementation
from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view


@torch.no_grad()
def step(
    model: Any, cache: NestedKVCache, ids: Tensor, positions: Tensor, view: str = "target"
) -> Tensor:
    """Logits ``[B, n, V]`` of a forward pass at positions ``[B, n]``."""
    length = int(positions.max()) + 1
    with (
        nested_attention_implementation(model),
        nest_view(view),
        cache.at(positions, context_length=length),
    ):
        out = model(
            input_ids=ids,
            position_ids=positions.clamp(min=0),
            use_cache=True,
            **{cache_keyword(model): cache},
        )
    return out.logits


def span(batch: int, start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).repeat(batch, 1)


def nest_(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = NestedQuantTensor.from_hp(module.weight)
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


@torch.no_grad()
def assert_planes_read_like_dense(
    model: PreTrainedModel, policy: str, view: str, blocks: list[int]
) -> None:
    """All is float64 but for sines and cosines, so that both ways cache the same codes.

    Dense queries are not rounded: they are about 1e-9 from the fixed-point ones.
    """
    ids = small_models.tokens(model, batch=2, length=20)
    dense, planes = (NestedKVCache(model.config, 20, 2, policy=policy) for _ in range(2))
    start = 0
    for count in blocks:
        block = ids[:, start : start + count]
        with nest_view(view):
            expected = model(block, use_cache=True, **{cache_keyword(model): dense}).logits
        out = step(model, planes, block, span(2, start, count), view)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-7)
        start += count


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_planes_give_what_dense_reads_give(family: str) -> None:
    model = small_models.exact_(small_models.build(family))  # windows of 8 are passed
    assert_planes_read_like_dense(model, "kv8/kv8", "target", [12, 1, 5, 2])


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("policy", ["kv4/kv8", "kv8/kv8", "recent(4)", "auto(10)"])
def test_planes_are_read_by_view_and_policy(policy: str, view: str) -> None:
    model = small_models.exact_(small_models.build("llama-gqa"))
    # One row at a time: a dense read cannot count recent entries from each of several.
    assert_planes_read_like_dense(model, policy, view, [1] * 14)


def test_a_rejected_suffix_leaves_no_trace() -> None:
    """Rollback: the next block writes over what was rejected, from a lower length on."""
    model = small_models.build("qwen2")
    ids = small_models.tokens(model, batch=2, length=12)
    clean, rolled_back = (NestedKVCache(model.config, 20, batch_size=2) for _ in range(2))
    for cache in (clean, rolled_back):
        step(model, cache, ids[:, :6], span(2, 0, 6))
    step(model, rolled_back, ids[:, 1:8], span(2, 6, 7), "draft")

    positions = torch.stack((torch.arange(6, 10), torch.arange(6, 10)))
    expected = step(model, clean, ids[:, 6:10], positions)
    assert torch.equal(step(model, rolled_back, ids[:, 6:10], positions), expected)


def compiled(model: PreTrainedModel, backend: str) -> tuple[Any, list[Any]]:
    """The compiled model and the graphs that were compiled for it."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    return torch.compile(model, backend=count, fullgraph=True), graphs


@pytest.mark.parametrize("policy", ["kv4/kv8", "kv8/kv8", "recent(4)"])
def test_compiled_rounds_are_the_eager_ones_without_recompiling(policy: str) -> None:
    model = nest_(small_models.build("llama-gqa"))
    fast, graphs = compiled(model, "aot_eager")
    ids = small_models.tokens(model, batch=2, length=40)
    ours, theirs = (NestedKVCache(model.config, 40, batch_size=2, policy=policy) for _ in range(2))
    for start in range(0, 20, 4):  # four rounds of three drafts, and a verification
        for view, offset, count in (
            ("draft", 0, 1),
            ("draft", 1, 1),
            ("draft", 2, 1),
            ("target", 0, 4),
        ):
            block = ids[:, start + offset : start + offset + count]
            positions = span(2, start + offset, count) + torch.tensor([[0], [start]])
            out = step(fast, ours, block, positions, view)
            assert torch.equal(out, step(model, theirs, block, positions, view))
        assert len(graphs) == 2  # the draft's and the target's, from the first round on


def test_compiled_views_of_one_shape_do_not_share_a_graph() -> None:
    model = nest_(small_models.build("llama-gqa"))
    fast, graphs = compiled(model, "aot_eager")
    ids = small_models.tokens(model, batch=1, length=12)
    ours, theirs = (NestedKVCache(model.config, 40, policy="kv4/kv8") for _ in range(2))
    outputs = []
    for view in ("target", "draft", "target", "draft"):
        outputs.append(step(fast, ours, ids, span(1, 0, 12), view))
        assert torch.equal(outputs[-1], step(model, theirs, ids, span(1, 0, 12), view))

    assert len(graphs) == 2
    assert not torch.equal(outputs[0], outputs[1])
    names = [{node.target for node in graph.graph.nodes} for graph in graphs]
    assert all(torch.ops.nestq.nested_attention in targets for targets in names)


def test_auto_compiles_once_more_when_it_switches() -> None:
    model = small_models.build("llama-gqa")
    fast, graphs = compiled(model, "aot_eager")
    ids = small_models.tokens(model, batch=1, length=12)
    cache = NestedKVCache(model.config, 12, policy="auto(6)")
    for start in range(12):
        step(fast, cache, ids[:, start : start + 1], span(1, start, 1), "draft")
        assert len(graphs) == (1 if start < 6 else 2)


@pytest.mark.full
def test_inductor_rounds_are_the_eager_ones_to_rounding() -> None:
    model = small_models.build("llama-gqa")
    fast, graphs = compiled(model, "inductor")
    ids = small_models.tokens(model, batch=2, length=12)
    ours, theirs = (NestedKVCache(model.config, 40, batch_size=2) for _ in range(2))
    for start, count, view in (
        (0, 1, "draft"),
        (0, 4, "target"),
        (4, 1, "draft"),
        (4, 4, "target"),
    ):
        block, positions = ids[:, start : start + count], span(2, start, count)
        out = step(fast, ours, block, positions, view)
        expected = step(model, theirs, block, positions, view)
        # Two layers in float32; a flipped code of the cache would show.
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert len(graphs) == 2


def test_the_implementation_is_put_back_even_after_an_error() -> None:
    model = small_models.build("llama-gqa")
    before = model.config._attn_implementation
    context = nested_attention_implementation(model)
    context.__enter__()
    assert model.model.layers[0].self_attn.config._attn_implementation == "nestq"
    assert not context.__exit__(RuntimeError, RuntimeError("inside"), None)
    assert model.config._attn_implementation == before


def test_the_last_to_leave_puts_the_implementation_back() -> None:
    model = small_models.build("llama-gqa")
    before = model.config._attn_implementation
    one, other = nested_attention_implementation(model), nested_attention_implementation(model)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert model.config._attn_implementation == "nestq"
    other.__exit__(None, None, None)
    assert model.config._attn_implementation == before
    model(torch.tensor([[1]]))


def test_positions_nest_and_are_put_back_even_after_an_error() -> None:
    cache = NestedKVCache(small_models.build("llama-gqa").config, 8)
    x = torch.zeros(1, 2, 1, 16)
    outer = cache.at(span(1, 3, 1))
    outer.__enter__()
    with cache.at(span(1, 5, 1)):
        assert cache.update(x, x, 0)[0].positions.tolist() == [[5]]
    assert cache.update(x, x, 0)[0].positions.tolist() == [[3]]
    assert not outer.__exit__(RuntimeError, RuntimeError("inside"), None)
    assert isinstance(cache.update(x, x, 0)[0], Tensor)


@torch.no_grad()
def test_planes_and_another_implementation_do_not_mix() -> None:
    model = small_models.build("llama-gqa")
    cache = NestedKVCache(model.config, 8)
    arguments = {"input_ids": torch.tensor([[1]]), cache_keyword(model): cache}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with cache.at(span(1, 0, 1)), pytest.raises(TypeError, match="'nestq' can read the cache"):
            model(**arguments)
    with (
        nested_attention_implementation(model),
        pytest.raises(TypeError, match=r"inside NestedKVCache.at\(positions\), got .* Tensor"),
    ):
        model(**arguments)


@pytest.mark.parametrize("name", ["dropout", "softcap", "s_aux", "position_bias"])
def test_what_would_change_the_result_is_refused(name: str) -> None:
    cache = NestedKVCache(small_models.build("llama-gqa").config, 8)
    x = torch.zeros(1, 2, 1, 16)
    with cache.at(span(1, 0, 1)):
        keys, values = cache.update(x, x, 0)
    argument = torch.ones(2) if name in ("s_aux", "position_bias") else 0.5

    with pytest.raises(NotImplementedError, match=name):
        nested_attention_forward(torch.nn.Module(), x, keys, values, None, **{name: argument})


@torch.no_grad()
def test_gemma_and_a_ready_made_mask_are_refused() -> None:
    model = small_models.build("gemma2")  # it caps its scores
    cache = NestedKVCache(model.config, 8)
    with pytest.raises(NotImplementedError, match="softcap"):
        step(model, cache, torch.tensor([[1]]), span(1, 0, 1))

    model = small_models.build("llama-gqa")
    cache = NestedKVCache(model.config, 8)
    arguments = {"attention_mask": torch.zeros(1, 1, 1, 8), cache_keyword(model): cache}
    with (
        nested_attention_implementation(model),
        cache.at(span(1, 0, 1)),
        pytest.raises(ValueError, match="attention_mask must be None"),
    ):
        model(input_ids=torch.tensor([[1]]), **arguments)


@pytest.mark.parametrize(
    "positions", [torch.arange(3), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1, 3)]
)
def test_positions_of_another_form_are_refused(positions: Tensor) -> None:
    cache = NestedKVCache(small_models.build("llama-gqa").config, 8)
    with pytest.raises(ValueError, match=r"positions must be int64 of shape \[1, n\]"):
        cache.at(positions).__enter__()


def test_auto_asks_for_the_context_length_at_once() -> None:
    cache = NestedKVCache(small_models.build("llama-gqa").config, 8, policy="auto(4)")
    with pytest.raises(ValueError, match="context_length must be given"):
        cache.at(span(1, 0, 1)).__enter__()
