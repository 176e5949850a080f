"""QuantSpec's cache in the engine: the target's tokens at any gamma, and its operator."""

import copy
from functools import cache
from typing import Any

import pytest
import small_models
import torch
from nested_models import nest_
from speculative_runs import cache_of, padded_prompts, run
from torch import Tensor
from transformers import PreTrainedModel

from nestq import QuantSpecKVCache
from nestq.attention import nested_attention_implementation
from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.kv_caches import new_cache
from nestq.kv_policy import KVPolicy
from nestq.reference.kv_quantspec import GROUP, value_groups
from nestq.reference.quantspec import SLOTS
from nestq.speculative import SpeculativeOutput
from nestq.speculative.round import NestedForward
from nestq.view import View

# Prompts that end just before multiples of G, so that 16 new tokens cross one in every row.
WIDTH = 4 * GROUP - 2
PADS = [0, GROUP + 2, 2 * GROUP + 4, WIDTH - 12]


@cache
def nested_model(family: str = "llama-gqa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model that several tests share, with a context for several groups and no end token."""
    model = nest_(small_models.build(family, dtype=dtype, max_position_embeddings=1024))
    model.generation_config.eos_token_id = None
    return model


def decode(model: PreTrainedModel, tokens: Tensor, gamma: int, **options: Any) -> SpeculativeOutput:
    return run(model, tokens, gamma, **{"kv": "quantspec", **options})


def held(output: SpeculativeOutput, row: int = 0) -> list[Tensor]:
    """What the cache of a row holds: recent tokens, and the groups that were quantized."""
    cache = cache_of(output)
    length = int(cache.lengths[row])
    recent = torch.arange(max(0, length - 2 * GROUP), length) % SLOTS
    groups = max(0, (length - 1) // GROUP - 1)
    parts = []
    for layer in cache.layers:
        for planes in (layer.key_planes, layer.value_planes):
            for plane in (planes.base, planes.refinement, planes.scale, planes.zero):
                scales_of_keys = plane.shape[2] == planes.base.shape[2] // GROUP
                parts.append(plane[row, :, : groups if scales_of_keys else groups * GROUP])
            parts.append(planes.recent[row][:, recent])
    return parts


def assert_same(
    ours: SpeculativeOutput, theirs: SpeculativeOutput, row: int = 0, other_row: int = 0
) -> None:
    assert cache_of(ours).lengths[row] == cache_of(theirs).lengths[other_row]
    for one, other in zip(held(ours, row), held(theirs, other_row), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("family", "gammas"), [("llama-gqa", range(1, 8)), ("mistral", range(3, 4))]
)
def test_every_gamma_gives_the_targets_tokens_and_cache(family: str, gammas: range) -> None:
    """The cache holds keys and values of the second layer, so it would show any other bit."""
    model = nested_model(family)  # mistral has a window of 8
    tokens, mask = padded_prompts(model, PADS, WIDTH)
    expected = decode(model, tokens, 0, attention_mask=mask)
    crossed = cache_of(expected).lengths // GROUP > (WIDTH - torch.tensor(PADS)) // GROUP
    assert crossed.tolist() == [True, True, True, False]
    accepted = drafted = 0
    for gamma in gammas:
        output = decode(model, tokens, gamma, attention_mask=mask)
        assert torch.equal(output.sequences, expected.sequences), gamma
        for row in range(len(PADS)):
            assert_same(output, expected, row, row)
        accepted += output.metrics.accepted
        drafted += output.metrics.drafted
    assert 0 < accepted < drafted


def test_long_generation_crosses_many_groups() -> None:
    model = nested_model("qwen2")
    tokens, mask = padded_prompts(model, [0, 37], 240)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 2 * GROUP + 20}
    expected = decode(model, tokens, 0, **options)
    output = decode(model, tokens, 5, **options)
    assert torch.equal(output.sequences, expected.sequences)
    for row in range(2):
        assert_same(output, expected, row, row)
    assert (cache_of(output).lengths // GROUP).tolist() == [4, 3]


def test_a_row_of_a_padded_batch_equals_the_prompt_alone() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, PADS, WIDTH)
    together = decode(model, tokens, 3, attention_mask=mask)
    for row, pad in enumerate(PADS):
        alone = decode(model, tokens[row : row + 1, pad:], 3)
        assert torch.equal(together.sequences[row, pad:], alone.sequences[0])
        assert_same(together, alone, row)


@pytest.mark.parametrize(
    ("chunk", "width"), [(1, 2 * GROUP + 6), (100, 2 * GROUP + 6), (300, WIDTH)]
)
def test_the_prompt_may_be_read_in_chunks(chunk: int, width: int) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 200], width)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4}
    expected = decode(model, tokens, 2, **options)
    output = decode(model, tokens, 2, prefill_chunk_size=chunk, **options)
    assert torch.equal(output.sequences, expected.sequences)
    for row in range(2):
        assert_same(output, expected, row, row)


def test_a_16_bit_model_keeps_recent_tokens_in_16_bits() -> None:
    model = nested_model("phi3", torch.bfloat16)
    tokens, mask = padded_prompts(model, [0, GROUP], 2 * GROUP - 4)
    expected = decode(model, tokens, 0, attention_mask=mask)
    output = decode(model, tokens, 3, attention_mask=mask)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache_of(output).layers[0].key_planes.recent.dtype == torch.bfloat16


def test_samples_do_not_depend_on_the_batch() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, GROUP + 2], WIDTH)
    options: dict[str, Any] = {"do_sample": True, "seed": [5, 6]}
    together = decode(model, tokens, 3, attention_mask=mask, **options)
    alone = decode(model, tokens[1:, GROUP + 2 :], 3, **options | {"seed": [6]})
    assert torch.equal(together.sequences[1:, GROUP + 2 :], alone.sequences)


def test_the_cache_of_the_user_says_what_drafts_read() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, WIDTH)
    expected = decode(model, tokens, 4)
    cache = QuantSpecKVCache(model.config, WIDTH + 21)
    for _ in range(2):
        output = decode(model, tokens, 4, kv=None, **{cache_keyword(model): cache})
        assert cache_of(output) is cache
        assert torch.equal(output.sequences, expected.sequences)
        assert output.metrics.accepted == expected.metrics.accepted
        assert_same(output, expected)
        cache.reset()
    assert cache.lengths.tolist() == [0]


def test_policies_and_caches_that_do_not_belong_together_are_refused() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 9)
    keyword = cache_keyword(model)
    with pytest.raises(ValueError, match="kv must be left out or be that of the cache"):
        run(model, tokens, 2, kv="kv4/kv8", **{keyword: QuantSpecKVCache(model.config, 64)})
    with pytest.raises(ValueError, match="kv must be left out or be that of the cache"):
        decode(model, tokens, 2, **{keyword: NestedKVCache(model.config, 64)})
    with pytest.raises(ValueError, match="max_length of at least 28"):
        decode(model, tokens, 2, kv=None, **{keyword: QuantSpecKVCache(model.config, 27)})
    with pytest.raises(ValueError, match="policy of a QuantSpecKVCache"):
        NestedKVCache(model.config, 64, policy="quantspec")
    sizes: Any = model.config, 64, 2, torch.device("cpu"), torch.float16
    assert type(new_cache(KVPolicy("kv4"), *sizes)) is NestedKVCache
    cache = new_cache(KVPolicy("quantspec"), *sizes)
    assert type(cache) is QuantSpecKVCache
    assert cache.policy == KVPolicy.parse("quantspec")
    assert cache.layers[1].value_planes.recent.dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"head_dim": 192}, {}, "config cannot have a QuantSpecKVCache: .* got 192"),
        ({"head_dim": 15}, {}, "even head size, got 15"),
        ({}, {"max_length": 0}, "max_length must be an int >= 1, got 0"),
        ({}, {"batch_size": 1.5}, "batch_size must be an int >= 1, got 1.5"),
        ({}, {"dtype": torch.int8}, "dtype must be a floating point dtype, got torch.int8"),
    ],
)
def test_wrong_arguments_are_refused(
    change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    config = copy.deepcopy(nested_model().config)
    config.update(change)
    with pytest.raises(ValueError, match=message):
        QuantSpecKVCache(config, **{"max_length": 64, **options})


@torch.no_grad()
def test_it_is_used_at_positions_and_with_its_attention_only() -> None:
    model = nested_model()
    tokens, positions = small_models.tokens(model, 1, 4), torch.arange(4)[None]
    cache = QuantSpecKVCache(model.config, 3 * GROUP)
    keyword = {cache_keyword(model): cache}
    with pytest.raises(TypeError, match=r"inside QuantSpecKVCache\.at"):
        model(tokens, **keyword)
    with cache.at(positions), pytest.raises(TypeError, match="only the attention implementation"):
        model(tokens, position_ids=positions, **keyword)
    with (
        pytest.raises(ValueError, match=r"positions must be int64 of shape \[1, n\]"),
        cache.at(positions.int()),
    ):
        pass
    forward = NestedForward(model, model, cache, torch.zeros(1, 1, dtype=torch.int64))
    with (
        nested_attention_implementation(model),
        pytest.raises(ValueError, match="below the cache's capacity 384, got 385"),
    ):
        forward("target", tokens, positions + 3 * GROUP - 2)


def test_rows_can_be_repeated_selected_and_reordered() -> None:
    config = nested_model().config
    cache = QuantSpecKVCache(config, 64, batch_size=2)
    for layer in cache.layers:
        for planes in (layer.key_planes, layer.value_planes):
            for tensor in planes.tensors():
                tensor.copy_(torch.arange(2).view(2, 1, 1, 1))
    cache.lengths.copy_(torch.tensor([5, 9]))

    def rows() -> list[int]:
        found = [
            tensor[:, 0, 0, 0].long().tolist()
            for layer in cache.layers
            for planes in (layer.key_planes, layer.value_planes)
            for tensor in planes.tensors()
        ]
        assert all(one == found[0] for one in found)
        assert cache.lengths.tolist() == [[5, 9][row] for row in found[0]]
        return found[0]

    cache.batch_repeat_interleave(2)
    assert rows() == [0, 0, 1, 1]
    address = cache.layers[0].key_planes.base.data_ptr()
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    assert rows() == [1, 0, 0, 0]
    assert cache.layers[0].key_planes.base.data_ptr() == address
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert rows() == [0, 1]


def operands(count: int, strided: bool = False) -> list[Any]:
    """Arguments of the operator for 2 rows of which the second begins with a pad."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = [4, 2, 2]
    if strided:
        states = list(random(2, count, 8, 16).transpose(1, 2).split(heads, 1))
    else:
        states = [random(2, h, count, 16) for h in heads]
    last = torch.tensor([[2 * GROUP + 1], [count - 2]])
    positions = (last - torch.arange(count - 1, -1, -1)).clamp(min=-1)
    cache: list[Tensor] = []
    for scales in ((1, 16), (GROUP, value_groups(16))):
        cache.append(random(2, 2, SLOTS, 16))
        cache += [torch.randint(0, 256, (2, 2, GROUP, 8), dtype=torch.uint8) for _ in "ur"]
        cache += [random(2, 2, *scales) for _ in "sz"]
    return [*states, positions, *cache]


@pytest.mark.parametrize(
    ("count", "strided", "refinement"), [(3, False, False), (3, True, True), (270, False, True)]
)
def test_the_operator_is_sound(count: int, strided: bool, refinement: bool) -> None:
    arguments = (*operands(count, strided), refinement, 0.25, 5)
    operator = torch.ops.nestq.quantspec_attention
    torch.library.opcheck(operator.default, arguments)
    assert operator(*arguments).transpose(1, 2).is_contiguous()


@torch.no_grad()
def test_passes_are_compiled_in_order() -> None:
    """The second one writes again what the first one wrote, and attends to it."""

    def attend(query: Tensor, keys: Tensor, *rest: Tensor) -> Tensor:
        attention = torch.ops.nestq.quantspec_attention
        out = attention(query + 1, keys * 3, *rest, False, 0.25, 0)
        return out + attention(query, keys, *rest, True, 0.25, 0)

    arguments = operands(3)
    others = [x.clone() for x in arguments]
    expected = attend(*arguments)
    out = torch.compile(attend, fullgraph=True)(*others)
    assert torch.equal(out, expected)
    for ours, theirs in zip(others, arguments, strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_a_compiled_model_gives_the_same_logits_and_cache() -> None:
    model = nest_(small_models.build("llama-gqa", num_hidden_layers=1))
    pads = torch.tensor([[0], [GROUP]])
    tokens = small_models.tokens(model, 2, 2 * GROUP + 3)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    logits, caches = [], []
    for forward in (model, compiled):
        cache = QuantSpecKVCache(model.config, 3 * GROUP, 2)
        call = NestedForward(model, forward, cache, pads)
        with nested_attention_implementation(model):
            prompt = call("target", tokens[:, :-5], torch.arange(tokens.shape[1] - 5))
            columns = torch.arange(tokens.shape[1] - 5, tokens.shape[1])
            draft = call("draft", tokens[:, -5:-4], columns[:1])
            logits.append([prompt, draft, call("target", tokens[:, -5:], columns)])
        planes = [(layer.key_planes, layer.value_planes) for layer in cache.layers]
        caches.append([x for pair in planes for half in pair for x in half.tensors()])
    torch._dynamo.reset()
    for ours, theirs in zip(*logits, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(logits[0][1][:, 0], logits[0][2][:, 0])
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_a_draft_reads_upper_nibbles_alone() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 2 * GROUP + 2)
    cache = QuantSpecKVCache(model.config, 3 * GROUP)
    forward = NestedForward(model, model, cache, torch.zeros(1, 1, dtype=torch.int64))
    columns = torch.arange(2 * GROUP + 2)

    def logits() -> list[Tensor]:
        views: list[View] = ["draft", "target"]
        return [forward(view, tokens[:, -1:], columns[-1:]) for view in views]

    with nested_attention_implementation(model):
        forward("target", tokens, columns)
        draft, target = logits()
        for layer in cache.layers:
            for planes in (layer.key_planes, layer.value_planes):
                planes.refinement.bitwise_xor_(0xFF)
        poisoned_draft, poisoned_target = logits()
    assert torch.equal(poisoned_draft, draft)
    assert not torch.equal(poisoned_target, target)


@pytest.mark.gpu
def test_rounds_in_graphs_on_a_gpu() -> None:
    """Every row crosses a multiple of G, in one replay or another."""
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens, mask = padded_prompts(model, PADS, WIDTH)
    options: dict[str, Any] = {"attention_mask": mask.cuda(), "max_new_tokens": 40}
    expected = decode(model, tokens.cuda(), 0, cuda_graph=False, **options)
    for gamma in (0, 1, 4, 4):
        output = decode(model, tokens.cuda(), gamma, **options)
        assert output.metrics.in_graph
        assert torch.equal(output.sequences, expected.sequences)
        for row in range(len(PADS)):
            assert_same(output, expected, row, row)


@pytest.mark.gpu
def test_recent_tokens_in_32_bits_are_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"torch\.bfloat16\) on a GPU"):
        QuantSpecKVCache(nested_model().config, 64, device="cuda")
