"""The promise on a real model and real prompts: speculative decoding gives the target's tokens.

SmolLM2-135M-Instruct is rounded to nearest, which takes seconds and makes a poor draft: many
rejections. Prompts with one gamma share a left-padded batch, and are decoded without a draft in
other batches, so that the tests also hold rows to what they give in other company.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nestq import DecodingMetrics, NestedKVCache, bitnest_w4w8, quantize_, speculative_generate
from nestq.attention import nested_attention_implementation
from nestq.data import (
    chat_prompt_tokens,
    code_prompt_tokens,
    heldout_tokens,
    humaneval_prompts,
    tokenize_texts,
)
from nestq.pretrained import load_model
from nestq.speculative import SpeculativeOutput
from nestq.speculative.round import NestedForward
from nestq.view import View

NEW = 24
FULL_NEW = 32
GAMMAS = range(1, 9)
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    model, tokenizer = load_model("smollm2-135m")
    quantize_(model, bitnest_w4w8(rotation="none"), progress=False)
    return model, tokenizer


@pytest.fixture(scope="module")
def prompts(loaded: Loaded) -> list[list[int]]:
    """25 chats and 25 pieces of code, in turn."""
    _, tokenizer = loaded
    chats = chat_prompt_tokens(tokenizer, 25, max_length=96)
    code = sorted(tokenize_texts(tokenizer, humaneval_prompts()), key=len)[:25]
    return [prompt for pair in zip(chats, code, strict=True) for prompt in pair]


@pytest.fixture(scope="module")
def expected(loaded: Loaded, prompts: list[list[int]]) -> list[list[int]]:
    """What the target generates without a draft."""
    return decode_all(loaded[0], prompts, gamma=0, batch_size=8)[0]


@pytest.fixture(scope="module")
def full_prompts(loaded: Loaded) -> list[list[int]]:
    """80 chats, 80 requests for code and 40 texts of up to 1000 tokens, in order of length."""
    _, tokenizer = loaded
    chats = chat_prompt_tokens(tokenizer, 80, max_length=256)
    texts = heldout_tokens(tokenizer, 40_000, max_length=1000)[:40]
    prompts = sorted([*chats, *code_prompt_tokens(tokenizer)[:80], *texts], key=len)
    assert len(prompts) == 200
    return prompts


def decode_all(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    gamma: int,
    batch_size: int,
    new_tokens: int = NEW,
) -> tuple[list[list[int]], list[DecodingMetrics]]:
    """New tokens of each prompt, filled up with the end token, and metrics of each batch."""
    end = model.config.eos_token_id
    results: list[list[int]] = []
    metrics = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        width = max(map(len, batch))
        rows = [[end] * (width - len(prompt)) + prompt for prompt in batch]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]
        output = speculative_generate(
            model,
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            gamma=gamma,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=end,
            return_dict_in_generate=True,
        )
        assert isinstance(output, SpeculativeOutput)
        assert output.metrics is not None
        metrics.append(output.metrics)
        # A batch is as wide as its longest row.
        for row in output.sequences[:, width:].tolist():
            results.append(row + [end] * (new_tokens - len(row)))
    return results, metrics


def test_fifty_prompts_give_the_tokens_of_the_target(
    loaded: Loaded, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    gammas = [1 + i % 8 for i in range(len(prompts))]
    accepted = drafted = 0
    for gamma in GAMMAS:
        indices = [i for i, g in enumerate(gammas) if g == gamma]
        group = [prompts[i] for i in indices]
        rows, metrics = decode_all(loaded[0], group, gamma, batch_size=len(group))
        for index, row in zip(indices, rows, strict=True):
            assert row == expected[index], f"prompt {index}, gamma {gamma}"
        accepted += metrics[0].accepted
        drafted += metrics[0].drafted

    assert 0.05 * drafted < accepted < 0.95 * drafted
    assert len(set(map(tuple, expected))) > 40


@pytest.mark.parametrize(("index", "gamma"), [(0, 1), (1, 3), (2, 5)])
def test_prompts_alone_give_the_tokens_of_the_batch(
    loaded: Loaded, prompts: list[list[int]], expected: list[list[int]], index: int, gamma: int
) -> None:
    prompt = [prompts[index]]
    alone, _ = decode_all(loaded[0], prompt, gamma=0, batch_size=1)
    speculative, metrics = decode_all(loaded[0], prompt, gamma, batch_size=1)

    assert alone == [expected[index]]
    assert speculative == alone
    assert metrics[0].accepted < metrics[0].drafted


@torch.no_grad()
def block_logits(model: PreTrainedModel, view: View, ids: Tensor, blocks: Sequence[int]) -> Tensor:
    """Logits ``[n, V]`` of the tokens ``ids`` ``[1, n]`` fed in blocks."""
    cache = NestedKVCache(model.config, ids.shape[1], batch_size=1)
    forward = NestedForward(model, model, cache, torch.zeros(1, 1, dtype=torch.int64))
    columns = torch.arange(ids.shape[1])[None]
    logits = []
    with nested_attention_implementation(model):
        for tokens, places in zip(ids.split(blocks, 1), columns.split(blocks, 1), strict=True):
            logits.append(forward(view, tokens, places))
    return torch.cat(logits, dim=1)[0]


def test_steps_and_blocks_give_the_same_logits(loaded: Loaded, prompts: list[list[int]]) -> None:
    model, _ = loaded
    ids = torch.tensor([prompts[0]])
    prefix = ids.shape[1] - 9
    steps = block_logits(model, "target", ids, [prefix] + [1] * 9)

    for gamma in (1, 4, 8):
        blocks = [prefix, gamma + 1]
        block = block_logits(model, "target", ids[:, : sum(blocks)], blocks)
        assert torch.equal(block, steps[: sum(blocks)]), f"gamma {gamma}"
    draft = block_logits(model, "draft", ids, [ids.shape[1]])
    assert (draft - steps).abs().max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize("gamma", GAMMAS)
def test_two_hundred_prompts_give_the_tokens_of_the_target(
    loaded: Loaded, full_prompts: list[list[int]], gamma: int
) -> None:
    """25 prompts of all lengths for each gamma, in batches of several sizes.

    They are decoded without a draft in batches of 5, which no speculative case has.
    """
    prompts = full_prompts[gamma - 1 :: len(GAMMAS)]
    expected, _ = decode_all(loaded[0], prompts, gamma=0, batch_size=5, new_tokens=FULL_NEW)
    for batch_size in (1, 3, 8):
        rows, metrics = decode_all(loaded[0], prompts, gamma, batch_size, FULL_NEW)
        for index, row in enumerate(rows):
            assert row == expected[index], f"prompt {index}, batch size {batch_size}"
        assert 0 < sum(m.accepted for m in metrics) < sum(m.drafted for m in metrics)
