"""Caches of models that are not from transformers: nested, the same numbers; or refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import small_gpts
import torch
import torch.nn.functional as F
import torchao.quantization
from small_gpts import BATCH, GPT, HEADS, SLOTS, IndexCopyGPT, IndexCopyLayer, SliceLayer
from torch import Tensor, nn

from nestq import bitnest_w4w8, nest_static_cache_, nest_view
from nestq.passes.backend import passes_only
from nestq.reference.kv import dequantize_kv, quantize_kv
from nestq.static_cache import NestedStaticCache

OPS = torch.ops.nestq


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def nest(model: nn.Module, kv: str = "kv8/kv8") -> list[str]:
    """Nest for prompts and for steps."""
    examples = [small_gpts.call(model, 3, 5), small_gpts.call(model, 7, 1)]
    return nest_static_cache_(model, examples, kv=kv)


def calls_in(model: Any, view: str) -> dict[str, int]:
    """How often each graph of the prompt calls what was there and what is there now."""
    nodes = model._static_cache.programs[0].graphs[view][0].graph.nodes
    names = [getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in nodes]
    counted = ("kv_append", "nested_attention", "scaled_dot_product_attention")
    written = ("index_copy_", "index_put_", "setitem", "repeat_interleave")
    return {name: names.count(name) for name in (*counted, *written) if name in names}


def with_quantized_states(model: nn.Module, view: str) -> nn.Module:
    """A dense module whose new keys and values are rounded as a view reads them."""
    dense = copy.deepcopy(model)

    def stored(states: Tensor) -> Tensor:
        base, refinement, scale = quantize_kv(states)
        return dequantize_kv(base, None if view == "draft" else refinement, scale, states.dtype)

    for layer in dense.layers:
        layer.stored = stored
    return dense


@pytest.mark.parametrize(("kv_heads", "scale"), [(HEADS, None), (2, 0.3)])
@pytest.mark.parametrize("name", small_gpts.GPTS)
@torch.no_grad()
def test_it_computes_attention_over_quantized_states(
    name: str, kv_heads: int, scale: float | None
) -> None:
    model = small_gpts.build(name, kv_heads=kv_heads, scale=scale).double()
    dense = {view: with_quantized_states(model, view) for view in ("draft", "target")}
    nest(model, "kv4/kv8")
    for start, count in ((0, 5), (5, 1), (6, 3), (SLOTS - 4, 4)):
        arguments = small_gpts.call(model, start, count)
        for view, reference in dense.items():
            with nest_view(view):
                ours = model(*arguments)
            # Queries are rounded to 2^-37 of their largest channel and weights to 2^-36: scores,
            # here below 2^6 in all terms, move by 2^-31, and so do sums of at most 2^5 weights,
            # relative to values and logits of 2^4 at most.
            assert (
                small_gpts.logits(ours) - small_gpts.logits(reference(*arguments))
            ).abs().max() <= 2.0**-24


@pytest.mark.parametrize("name", small_gpts.GPTS)
def test_updates_and_attention_are_replaced(name: str) -> None:
    model = small_gpts.build(name, layers=2)
    kind = type(model)
    names = [f"layers.{i}.{side}" for i in range(2) for side in ("keys", "values")]
    assert nest(model, "kv4/kv8") == names
    assert isinstance(model, kind)
    for view in ("draft", "target"):
        assert calls_in(model, view) == {"kv_append": 4, "nested_attention": 2}
    attentions = {
        view: [
            node.args for node in graph.graph.nodes if node.target is OPS.nested_attention.default
        ]
        for view, (graph, _) in model._static_cache.programs[0].graphs.items()
    }
    assert all(arguments[3] is None for arguments in attentions["draft"])
    assert all(arguments[3] is not None for arguments in attentions["target"])
    state = model.state_dict()
    assert not state.keys() & set(names)
    assert {"layers.1.values_base", "layers.1.values_refinement"} <= state.keys()
    assert state["layers.0.keys_base"].shape == (BATCH, 2, SLOTS, small_gpts.HEAD_DIM // 2)


@pytest.mark.parametrize("name", ["index_copy_", "slice"])
@torch.no_grad()
def test_compiled_it_computes_the_same_in_both_views(name: str) -> None:
    model = small_gpts.build(name)
    nest(model, "kv4/kv8")
    eager = copy.deepcopy(model)
    seen: list[Any] = []

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        call = passes_only(module, inputs)
        seen.append({getattr(node.target, "__name__", "") for node in module.graph.nodes})
        return call

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    outputs = {}
    for start, count in ((0, 5), (5, 1), (6, 3)):
        arguments = small_gpts.call(model, start, count)
        for view in ("draft", "target"):
            with nest_view(view):
                outputs[view] = small_gpts.logits(compiled(*arguments))
                assert torch.equal(outputs[view], small_gpts.logits(eager(*arguments)))
        assert not torch.equal(outputs["draft"], outputs["target"])
    # Rotation and both writes have become one call, as in models of transformers.
    assert all(("rotate_append" in names) == (name == "index_copy_") for names in seen)
    assert not any("scaled_dot_product_attention" in names for names in seen)


@torch.no_grad()
def test_linears_are_nested_by_torchao_before_and_after() -> None:
    models = [small_gpts.build("index") for _ in range(2)]
    nest(models[0])
    for model in models:
        with pytest.warns(UserWarning, match="one linear at a time"):
            torchao.quantization.quantize_(model, bitnest_w4w8(group_size=32, rotation="none"))
    nest(models[1])
    arguments = small_gpts.call(models[0], 0, 5)
    outputs = {}
    for view in ("draft", "target"):
        with nest_view(view):
            one, other = (model(*arguments) for model in models)
        assert torch.equal(one, other)
        outputs[view] = one
    dense = small_gpts.build("index")(*arguments)
    errors = {view: (out - dense).norm() / dense.norm() for view, out in outputs.items()}
    assert errors["target"] < 0.05 < errors["draft"] < 0.5


@torch.no_grad()
def test_what_a_buffer_held_is_kept() -> None:
    model = small_gpts.build("slice").double()
    model(*small_gpts.call(model, 0, 5))
    held = quantize_kv(model.layers[0].keys.transpose(1, 2))
    nest(model)
    for name, plane in zip(("base", "refinement", "scale"), held, strict=True):
        assert torch.equal(getattr(model.layers[0], f"keys_{name}"), plane)


@torch.no_grad()
def test_a_sliding_window_is_found() -> None:
    class Windowed(IndexCopyGPT):
        def mask(self, ids: Tensor, positions: Tensor) -> Tensor:
            distance = positions[:, None] - torch.arange(SLOTS)
            return torch.where((distance >= 0) & (distance < 6), 0.0, -torch.inf)

    model = Windowed()
    nest(model)
    graph = model._static_cache.programs[0].graphs["target"][0].graph
    (attention,) = graph.find_nodes(op="call_function", target=OPS.nested_attention.default)
    assert attention.args[9] == 6


class Softcapped(IndexCopyLayer):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        scores = torch.tanh(query @ keys.mT / 5) * 5
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


class Dropping(IndexCopyLayer):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, mask, dropout_p=0.1)


class ReadTwice(IndexCopyLayer):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return super().attend(query, keys, values, mask) + self.keys.mean()


class NotInOrder(IndexCopyLayer):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return super().attend(query, keys.flip(1), values, mask)


class TiledHeads(SliceLayer):
    def repeated(self, states: Tensor) -> Tensor:
        return states.repeat(1, 1, HEADS // self.kv_heads, 1).transpose(1, 2)


class OwnScale(IndexCopyLayer):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return super().attend(query, keys * 2, values, mask)


class WrittenTwice(IndexCopyLayer):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        self.keys.mul_(0.5)
        return super().attend(query, keys, values, mask)


class ViewWritten(IndexCopyLayer):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        self.values[0].zero_()
        return super().attend(query, keys, values, mask)


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (Softcapped, r"'layers.0.keys' .* no scaled_dot_product_attention reads it"),
        (Dropping, r"'layers.0.keys' .* dropout_p=0.1"),
        (ReadTwice, r"'layers.0.keys' .* reads it, too"),
        (NotInOrder, r"'layers.0.keys' .* not its first positions in order"),
        (TiledHeads, r"'layers.0.keys' .* not its first positions in order"),
        (OwnScale, r"'layers.0.keys' .* not its first positions in order"),
        (WrittenTwice, r"'layers.0.keys' .* written twice"),
        (ViewWritten, r"'layers.0.values' .* writes a view of it"),
    ],
)
def test_what_is_not_the_pattern_is_refused(layer: type[nn.Module], found: str) -> None:
    base = small_gpts.SliceGPT if issubclass(layer, SliceLayer) else IndexCopyGPT
    assert_refused(type("GPT", (base,), {"kind": layer})(), found)


def assert_refused(model: GPT, found: str) -> None:
    """With an error, and nothing of the module has changed."""
    kind, before = type(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=found):
        nest(model)
    assert type(model) is kind
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(map(torch.equal, before.values(), after.values()))


def all_visible(ids: Tensor, positions: Tensor) -> Tensor:
    return torch.arange(SLOTS)[None, :] <= positions[:, None] + 1


def of_tokens(ids: Tensor, positions: Tensor) -> Tensor:
    return (torch.arange(SLOTS) <= positions[:, None]) & (ids[:, None, :1] != 3)[:, None]


def with_bias(ids: Tensor, positions: Tensor) -> Tensor:
    distance = torch.arange(SLOTS) - positions[:, None]
    return torch.where(distance <= 0, distance * 0.1, -torch.inf)


def written(ids: Tensor, positions: Tensor) -> Tensor:
    mask = torch.arange(SLOTS) <= positions[:, None]
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (all_visible, "does not let each query see the positions up to its own, and no others"),
        (of_tokens, "depends on the input 'ids'"),
        (with_bias, "adds other numbers than 0 and -inf"),
        (written, "writes the mask of its attention in place"),
        (lambda *_: None, "does not let each query see the positions up to its own"),
    ],
)
def test_other_masks_are_refused(mask: Callable[..., Any], found: str) -> None:
    model = type("GPT", (IndexCopyGPT,), {"mask": staticmethod(mask)})()
    assert_refused(model, f"'layers.0.keys' .* {found}")


def test_wrong_arguments_are_refused() -> None:
    model = small_gpts.build("index")
    example = small_gpts.call(model, 3, 5)
    for kv in ("auto(8)", "quantspec"):
        with pytest.raises(ValueError, match=r"kv must be 'kv8/kv8', 'kv4/kv8' or 'recent\(n\)'"):
            nest_static_cache_(model, [example], kv=kv)
    with pytest.raises(ValueError, match="examples must be a list of at least one call"):
        nest_static_cache_(model, [])
    with pytest.raises(TypeError, match="misses the argument 'positions'"):
        nest_static_cache_(model, [example[:1]])
    with pytest.raises(TypeError, match="positions must be a tensor"):
        nest_static_cache_(model, [{"ids": example[0], "positions": [1]}])
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        nest_static_cache_(None, [example])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="and Linear has none"):
        nest_static_cache_(nn.Linear(4, 4).eval(), [(torch.zeros(2, 4),)])
    with pytest.raises(ValueError, match="evaluation mode, got model in training"):
        nest_static_cache_(model.train(), [example])
    assert not isinstance(model, NestedStaticCache)


@torch.no_grad()
def test_other_calls_are_refused() -> None:
    model = small_gpts.build("index")
    nest_static_cache_(model, [small_gpts.call(model, 3, 5)])
    with pytest.raises(ValueError, match="no example that nest_static_cache_ was given is like"):
        model(*small_gpts.call(model, 7, 1))
    ids, positions = small_gpts.call(model, 3, 2)
    assert torch.equal(model(positions=positions, ids=ids), model(ids, positions))
    with pytest.raises(TypeError, match="other arguments than"):
        model(ids, positions, ids=ids)
    with pytest.raises(ValueError, match="must have dense buffers"):
        nest_static_cache_(model, [(ids, positions)])
    with pytest.raises(ValueError, match="evaluation mode only"):
        model.train()(ids, positions)
