"""``nested_kv`` finds rotation and writes of every layer, and leaves alone what only looks so."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_models
import torch
from reference.nested_kv import planes, random
from test_attention import nest_, span, step
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache
from nestq.passes.nested_kv import NestedKV

FAMILIES = ["llama-gqa", "mistral", "qwen2", "qwen3", "phi3", "gemma2"]
OPS = torch.ops.nestq


class Backend:
    """A backend for torch.compile that runs the rewritten graph as it stands.

    Attributes:
        matches: of each graph.
        graphs: after the pass.
    """

    def __init__(self) -> None:
        self.matches: list[int] = []
        self.graphs: list[Graph] = []

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.matches.append(NestedKV()(module.graph))
        self.graphs.append(module.graph)
        module.graph.lint()
        module.recompile()
        return module.forward


def count_calls(graph: Graph, name: str) -> int:
    return sum(node.target is getattr(OPS, name) for node in graph.nodes)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def build(family: str, **options: Any) -> PreTrainedModel:
    # An activation function that has the same bits compiled and not.
    activation = {"hidden_activation" if family == "gemma2" else "hidden_act": "relu"}
    if family == "gemma2":
        options["attn_logit_softcapping"] = None
    options = {"num_hidden_layers": 1, **activation, **options}
    return nest_(small_models.build(family, **options))


def all_planes(cache: NestedKVCache) -> list[Tensor]:
    return [
        plane
        for layer in cache.layers
        for side in (layer.key_planes, layer.value_planes)
        for plane in (side.base, side.refinement, side.scale)
    ]


def assert_same_as_eager(
    model: PreTrainedModel,
    view: str,
    rotate_keys: bool = False,
    fused: bool = True,
    policy: str = "kv4/kv8",
) -> None:
    """Blocks of 5 rows, the second of which begins with pads, and of 1 row."""
    backend = Backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours, theirs = (
        NestedKVCache(model.config, 9, 2, policy=policy, rotate_keys=rotate_keys) for _ in "ab"
    )
    ids = small_models.tokens(model, batch=2, length=6)
    positions = span(2, 0, 6) - torch.tensor([[0], [2]])
    for block in (slice(0, 5), slice(5, 6)):
        arguments = ids[:, block], positions[:, block].contiguous(), view
        assert torch.equal(step(compiled, ours, *arguments), step(model, theirs, *arguments))
    assert all(map(torch.equal, all_planes(ours), all_planes(theirs)))
    layers = model.config.num_hidden_layers
    assert backend.matches == [layers * fused] * 2
    for graph in backend.graphs:
        assert count_calls(graph, "rotate_append") == layers * fused
        assert count_calls(graph, "kv_append") == 2 * layers * (not fused)
        assert count_calls(graph, "hadamard") == 2 * layers * (rotate_keys and not fused)


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_family_matches_and_computes_the_same(family: str, view: str) -> None:
    assert_same_as_eager(build(family), view)


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "gemma2"])
def test_transformed_keys_are_fused_too(family: str, view: str) -> None:
    assert_same_as_eager(build(family, dtype=torch.bfloat16), view, rotate_keys=True)


def test_sparse_drafts_are_fused_too() -> None:
    assert_same_as_eager(build("llama-gqa"), "draft", policy="kv8/kv8+streaming(1,2)")


def test_heads_that_are_transformed_in_blocks_are_left_alone() -> None:
    model = build("llama-gqa", head_dim=24)
    assert_same_as_eager(model, "draft", rotate_keys=True, fused=False)


def test_several_layers_in_16_bits() -> None:
    model = build("llama-gqa", dtype=torch.bfloat16, num_hidden_layers=3)
    assert_same_as_eager(model, "target")


def test_a_partial_rotation_is_left_alone() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = build("phi3", rope_parameters=rope)
    backend = Backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours, theirs = (NestedKVCache(model.config, 9) for _ in "ab")
    ids, positions = small_models.tokens(model, 1, 5), span(1, 0, 5)
    assert torch.equal(step(compiled, ours, ids, positions), step(model, theirs, ids, positions))
    assert backend.matches == [0]
    assert count_calls(backend.graphs[0], "kv_append") == 2


class InInductor(CustomGraphPass):
    """The pass as Inductor calls it."""

    def __init__(self) -> None:
        self.matches: list[int] = []

    def __call__(self, graph: Graph) -> None:
        self.matches.append(NestedKV()(graph))

    def uuid(self) -> None:
        """Nothing is cached, so that the pass runs."""


def test_rows_of_inductor_do_not_depend_on_their_number() -> None:
    model = build("llama-gqa")
    in_inductor = InInductor()
    ids = small_models.tokens(model, batch=1, length=10)
    outputs = []
    with torch._inductor.config.patch(pre_grad_custom_pass=in_inductor):
        compiled = torch.compile(model, fullgraph=True)
        for size in (1, 5):
            cache = NestedKVCache(model.config, 12)
            blocks = ids.split(size, 1)
            starts = range(0, 10, size)
            pairs = zip(blocks, starts, strict=True)
            logits = [step(compiled, cache, b, span(1, start, size)) for b, start in pairs]
            outputs.append((torch.cat(logits, 1), *all_planes(cache)))
    assert in_inductor.matches == [1, 1]
    assert all(map(torch.equal, *outputs))


# A layer as functions, to spell it in other ways.

HEAD_DIM = 16
SLOTS = 9


def inputs() -> list[Tensor]:
    """Query, key, value, cos, sin, positions, and the planes of keys and values."""
    states = [random(2, heads, 3, HEAD_DIM, seed=heads) for heads in (4, 2, 2)]
    angles = random(2, 3, HEAD_DIM // 2).repeat(1, 1, 2)
    positions = torch.tensor([[4, 5, 6], [-1, 0, 1]])
    cache = [*planes(2, 2, SLOTS, HEAD_DIM), *planes(2, 2, SLOTS, HEAD_DIM, seed=2)]
    return [*states, angles.cos(), angles.sin(), positions, *cache]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    turned = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return states * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def append(states: Tensor, positions: Tensor, base: Tensor, fine: Tensor, scale: Tensor) -> None:
    OPS.kv_append(states, positions, base, fine, scale)


def attend(query: Tensor, positions: Tensor, *cache: Tensor | None) -> Tensor:
    return OPS.nested_attention(query, positions, *cache, 0.25, 0, 0)


def matches(layer: Callable[..., Any], arguments: list[Tensor] | None = None) -> int:
    """Matches in a layer; what it returns and what it writes does not change."""
    arguments = inputs() if arguments is None else arguments
    ours, theirs = ([tensor.clone() for tensor in arguments] for _ in "ab")
    backend = Backend()
    with torch.no_grad():
        out = torch.compile(layer, backend=backend, fullgraph=True)(*ours)
        expected = layer(*theirs)
    for one, other in zip([*out, *ours], [*expected, *theirs], strict=True):
        assert torch.equal(one, other)
    assert len(backend.matches) == 1
    return backend.matches[0]


def layer_with(rotate: Callable[..., Tensor]) -> Callable[..., Any]:
    """A layer that rotates in its own way."""

    def layer(query, key, value, cos, sin, positions, *cache):
        rotated, rotated_key = rotate(query, cos, sin), rotate(key, cos, sin)
        append(rotated_key, positions, *cache[:3])
        append(value, positions, *cache[3:])
        return (attend(rotated, positions, *cache),)

    return layer


def with_functions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((torch.neg(x[:, :, :, half:]), x[:, :, :, 0:half]), 3)
    kept = torch.mul(x, torch.unsqueeze(cos, 1))
    return torch.add(kept, torch.mul(turned, torch.unsqueeze(sin, -3)))


def with_methods(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([second.neg(), first], dim=-1)
    return turned.mul(sin.unsqueeze(dim=1)).add(x.mul(cos.unsqueeze(dim=1)))


def with_operators(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = torch.chunk(x, 2, -1)
    turned = torch.cat(tensors=(operator.neg(second), first), dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return operator.add(operator.mul(sin, turned), operator.mul(cos, x))


def transformed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return OPS.hadamard(rotate(x, cos, sin))


def test_transformed_queries_and_keys_match() -> None:
    assert matches(layer_with(transformed)) == 1


@pytest.mark.parametrize("spelled", [rotate, with_functions, with_methods, with_operators])
def test_spellings_of_a_rotation_match(spelled: Callable[..., Tensor]) -> None:
    assert matches(layer_with(spelled)) == 1


def test_angles_may_be_common_to_all_rows() -> None:
    arguments = inputs()
    arguments[3:5] = [angle[:1] for angle in arguments[3:5]]
    assert matches(layer_with(rotate), arguments) == 1


def test_drafts_and_other_orders_match() -> None:
    def layer(query, key, value, cos, sin, positions, *cache):
        rotated_key = rotate(key, cos, sin)
        rotated = rotate(query, cos, sin)
        append(value, positions, *cache[3:])
        append(rotated_key, positions, *cache[:3])
        key_base, _, key_scale, value_base, _, value_scale = cache
        draft = key_base, None, key_scale, value_base, None, value_scale
        # A later reader of the planes has no writes of its own.
        return attend(rotated, positions, *draft), attend(query, positions, *cache)

    assert matches(layer) == 1


def test_two_layers_with_one_cache_match_both() -> None:
    once = layer_with(rotate)

    def layer(query, *rest):
        (out,) = once(query, *rest)
        return once(out, *rest)

    assert matches(layer) == 2


def test_only_the_last_writes_are_taken() -> None:
    once = layer_with(rotate)

    def layer(query, key, value, cos, sin, positions, *cache):
        append(key, positions, *cache[:3])
        append(key, positions, *cache[3:])
        return once(query, key, value, cos, sin, positions, *cache)

    assert matches(layer) == 1


def half_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = rotate(x[..., : HEAD_DIM // 2], cos[..., ::2], sin[..., ::2])
    return torch.cat((rotated, x[..., HEAD_DIM // 2 :]), dim=-1)


def turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((second, -first), dim=-1) * sin.unsqueeze(1)


def other_half_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-first, second), dim=-1) * sin.unsqueeze(1)


def halves_of_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    second, first = (x + 1).chunk(2, dim=-1)[1], x.chunk(2, dim=-1)[0]
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def unequal_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def of_other_pieces(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat(x[()].chunk(2, -1), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def of_others(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = (x + 1).chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def weighed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return torch.add(x * cos.unsqueeze(1), turned, alpha=2)


@pytest.mark.parametrize(
    "rotation",
    [
        half_rotated,
        turned_back,
        other_half_turned,
        halves_of_two,
        unequal_halves,
        of_other_pieces,
        of_others,
        weighed,
        lambda x, *_: x,
        lambda x, cos, sin: OPS.hadamard(transformed(x, cos, sin)),
    ],
)
def test_what_is_not_a_rotation_is_left_alone(rotation: Callable[..., Tensor]) -> None:
    assert matches(layer_with(rotation)) == 0


def test_angles_of_another_dtype_are_left_alone() -> None:
    arguments = inputs()
    arguments[:3] = [states.bfloat16() for states in arguments[:3]]
    assert matches(layer_with(rotate), arguments) == 0
    arguments[3:5] = [angle.bfloat16() for angle in arguments[3:5]]
    assert matches(layer_with(rotate), arguments) == 1


def key_returned(query, key, value, cos, sin, positions, *cache):
    rotated, rotated_key = rotate(query, cos, sin), rotate(key, cos, sin)
    append(rotated_key, positions, *cache[:3])
    append(value, positions, *cache[3:])
    return attend(rotated, positions, *cache), rotated_key


def query_returned(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(rotate(key, cos, sin), positions, *cache[:3])
    append(value, positions, *cache[3:])
    return attend(rotated, positions, *cache), rotated


def only_query_transformed(query, key, value, cos, sin, positions, *cache):
    rotated = transformed(query, cos, sin)
    append(rotate(key, cos, sin), positions, *cache[:3])
    append(value, positions, *cache[3:])
    return (attend(rotated, positions, *cache),)


def only_key_transformed(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(transformed(key, cos, sin), positions, *cache[:3])
    append(value, positions, *cache[3:])
    return (attend(rotated, positions, *cache),)


def key_returned_before_transform(query, key, value, cos, sin, positions, *cache):
    rotated, rotated_key = transformed(query, cos, sin), rotate(key, cos, sin)
    append(OPS.hadamard(rotated_key), positions, *cache[:3])
    append(value, positions, *cache[3:])
    return attend(rotated, positions, *cache), rotated_key


def other_angles(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(rotate(key, cos, cos), positions, *cache[:3])
    append(value, positions, *cache[3:])
    return (attend(rotated, positions, *cache),)


def other_positions(query, key, value, cos, sin, positions, *cache):
    rotated, moved = rotate(query, cos, sin), positions + 1
    append(rotate(key, cos, sin), positions, *cache[:3])
    append(value, moved, *cache[3:])
    return (attend(rotated, positions, *cache),)


def layer_that_reads(*read: int) -> Callable[..., Any]:
    """A layer whose attention reads the planes in another order."""

    def layer(query, key, value, cos, sin, positions, *cache):
        rotated = rotate(query, cos, sin)
        append(rotate(key, cos, sin), positions, *cache[:3])
        append(value, positions, *cache[3:])
        return (attend(rotated, positions, *(cache[i] for i in read)),)

    return layer


def keys_are_values(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(rotate(key, cos, sin), positions, *cache[:3])
    return (attend(rotated, positions, *cache[:3], *cache[:3]),)


def attention_first(query, key, value, cos, sin, positions, *cache):
    rotated, rotated_key = rotate(query, cos, sin), rotate(key, cos, sin)
    out = attend(rotated, positions, *cache)
    append(rotated_key, positions, *cache[:3])
    append(value, positions, *cache[3:])
    return (out,)


def planes_read_in_between(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(rotate(key, cos, sin), positions, *cache[:3])
    seen = cache[2].clone()
    append(value, positions, *cache[3:])
    return attend(rotated, positions, *cache), seen


def planes_written_in_between(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(rotate(key, cos, sin), positions, *cache[:3])
    append(value, positions, *cache[3:])
    cache[5].mul_(2)
    return (attend(rotated, positions, *cache),)


def key_written_after_rotation(query, key, value, cos, sin, positions, *cache):
    rotated, rotated_key = rotate(query, cos, sin), rotate(key, cos, sin)
    key.mul_(2)
    append(rotated_key, positions, *cache[:3])
    append(value, positions, *cache[3:])
    return (attend(rotated, positions, *cache),)


def value_written_after_append(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(value, positions, *cache[3:])
    value += 1
    append(rotate(key, cos, sin), positions, *cache[:3])
    return (attend(rotated, positions, *cache),)


def values_not_appended(query, key, value, cos, sin, positions, *cache):
    rotated = rotate(query, cos, sin)
    append(rotate(key, cos, sin), positions, *cache[:3])
    return (attend(rotated, positions, *cache),)


def no_attention(query, key, value, cos, sin, positions, *cache):
    append(rotate(key, cos, sin), positions, *cache[:3])
    append(value, positions, *cache[3:])
    return (rotate(query, cos, sin),)


@pytest.mark.parametrize(
    "layer",
    [
        key_returned,
        query_returned,
        only_query_transformed,
        only_key_transformed,
        key_returned_before_transform,
        other_angles,
        other_positions,
        layer_that_reads(3, 4, 5, 0, 1, 2),
        layer_that_reads(0, 4, 2, 3, 4, 5),
        layer_that_reads(0, 1, 2, 3, 4, 2),
        keys_are_values,
        attention_first,
        planes_read_in_between,
        planes_written_in_between,
        key_written_after_rotation,
        value_written_after_append,
        values_not_appended,
        no_attention,
    ],
)
def test_layers_that_only_look_so_are_left_alone(layer: Callable[..., Any]) -> None:
    assert matches(layer) == 0
