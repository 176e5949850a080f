"""A dense model in the engine of speculative decoding: the tokens of transformers' own generate."""

from contextlib import nullcontext

import pytest
import small_models
import torch
from speculative_runs import padded_prompts
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from nestq.attention import nested_attention_implementation
from nestq.dense_kv_cache import DenseKVCache
from nestq.kv_cache import cache_keyword
from nestq.speculative.prompts import Prompt, prefill
from nestq.speculative.round import NestedForward, Round
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection
from nestq.speculative.state import DecodingState

NEW = 16


@torch.no_grad()
def decode(model: PreTrainedModel, tokens: Tensor, pads: list[int]) -> Tensor:
    """Prompts and ``NEW`` tokens."""
    batch, width = tokens.shape
    columns = width + NEW
    cache = DenseKVCache(model.config, columns + 1, batch, dtype=model.dtype)
    state: DecodingState = DecodingState(cache, columns + 1, 0, 0)
    state.begin(tokens, torch.tensor(pads)[:, None], columns, 0, [])
    forward = NestedForward(model, model, cache, state.pads)
    selection = GreedySelection(ProcessedScores(LogitsProcessorList(), model.device))
    one_round = Round(forward, state, 0, selection, lambda _: nullcontext())
    with nested_attention_implementation(model):
        prefill(forward, Prompt(tokens, forward.pads, hidden=0, inputs={}), chunk=5)
        for count in range(NEW):
            one_round(width - 1 + count)
    assert state.finished.all()
    return state.ids[:, :columns]


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2", "mistral", "phi3"])
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model = small_models.build(family)  # mistral has a window of 8
    tokens = small_models.tokens(model, 1, 12)
    expected = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    assert torch.equal(decode(model, tokens, [0]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_left_padded_batch_are_the_prompts_alone(dtype: torch.dtype) -> None:
    model = small_models.build("llama-gqa", dtype=dtype)
    pads = [0, 3, 11]
    tokens, _ = padded_prompts(model, pads, 12)
    batch = decode(model, tokens, pads)
    for row, count in enumerate(pads):
        alone = decode(model, tokens[row : row + 1, count:], [0])
        assert torch.equal(batch[row, count:], alone[0])


def test_it_is_used_at_positions_only() -> None:
    model = small_models.build("llama-gqa")
    cache = DenseKVCache(model.config, 8)
    tokens = small_models.tokens(model, 1, 4)
    keyword = {cache_keyword(model): cache}
    with pytest.raises(TypeError, match=r"inside DenseKVCache\.at"):
        model(tokens, **keyword)
    positions = torch.arange(4)[None]
    with cache.at(positions), pytest.raises(TypeError, match="only the attention implementation"):
        model(tokens, position_ids=positions, **keyword)
    with (
        pytest.raises(ValueError, match=r"positions must be int64 of shape \[1, n\]"),
        cache.at(positions.int()),
    ):
        pass
    with pytest.raises(ValueError, match="max_length must be an int >= 1, got 0"):
        DenseKVCache(model.config, 0)


def test_the_operators_are_sound() -> None:
    query, keys, values = (torch.randn(2, heads, 3, 16) for heads in (4, 2, 2))
    positions = torch.tensor([[6, 7, 8], [-1, 0, 1]])
    caches = [torch.randn(2, 2, 9, 16) for _ in "kv"]
    operators = torch.ops.nestq
    torch.library.opcheck(operators.append_16.default, (keys, values, positions, *caches))
    attention = (query.transpose(1, 2).contiguous().transpose(1, 2), positions, *caches, 0.25, 5)
    torch.library.opcheck(operators.attention_16.default, attention)


@torch.no_grad()
def test_a_compiled_model_gives_the_same_logits() -> None:
    model = small_models.build("llama-gqa", num_hidden_layers=1)
    tokens, positions = small_models.tokens(model, 1, 4), torch.arange(4)[None]
    pads = torch.zeros(1, 1, dtype=torch.int64)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    logits = []
    with nested_attention_implementation(model):
        for forward in (model, compiled):
            cache = DenseKVCache(model.config, 8, dtype=torch.float32)
            call = NestedForward(model, forward, cache, pads)
            logits.append(call("target", tokens, positions))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
