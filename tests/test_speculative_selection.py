from typing import Any

import pytest
import small_models
import torch
from speculative_runs import NEW, nested_model, padded_prompts, run
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig

from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "encoder repetition penalty": {"encoder_repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[i] for i in range(40)]},
    "bias for a sequence": {"sequence_bias": {(3, 5): 9.0, (5,): 1.0}},
    "minimum of new tokens": {"min_new_tokens": 8, "eos_token_id": list(range(60))},
    "a forced end": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [3, 4]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_transformers(name: str) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [3, 0, 5], 9)
    options = {"attention_mask": mask, **PROCESSORS[name]}
    plain = {"attention_mask": mask, "eos_token_id": options.get("eos_token_id")}
    expected = run(model, tokens, gamma=0, **options).sequences
    assert not torch.equal(expected, run(model, tokens, gamma=0, **plain).sequences)
    for gamma in (1, 4):
        output = run(model, tokens, gamma, **options)
        assert torch.equal(output.sequences, expected)
        assert 0 < output.metrics.accepted < output.metrics.drafted
    for row in range(3):  # with its padding, which is context to a processor
        options["attention_mask"] = mask[row : row + 1]
        alone = run(model, tokens[row : row + 1], gamma=2, **options).sequences[0]
        assert torch.equal(expected[row, : len(alone)], alone)


class BansBySum(LogitsProcessor):
    """Bans tokens by the sum of the context, and keeps the contexts."""

    def __init__(self) -> None:
        self.contexts: list[list[list[int]]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.contexts.append(input_ids.tolist())
        assert scores.dtype == torch.float32
        vocabulary = torch.arange(scores.shape[1])
        return scores.masked_fill((input_ids.sum(1, keepdim=True) + vocabulary) % 3 == 0, -1e9)


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_each_position_has_its_own_context(gamma: int) -> None:
    model = nested_model("qwen2")
    tokens, mask = padded_prompts(model, [0, 6], 9)
    processor = BansBySum()
    processors = LogitsProcessorList([processor])
    output = run(model, tokens, gamma, attention_mask=mask, logits_processor=processors)
    for row in output.sequences:
        for n in range(9, 9 + NEW):
            assert (row[:n].sum() + row[n]) % 3 != 0
            assert any(row[:n].tolist() in context for context in processor.contexts)
    expected = run(
        model,
        tokens,
        gamma=0,
        attention_mask=mask,
        logits_processor=LogitsProcessorList([BansBySum()]),
    )
    assert torch.equal(output.sequences, expected.sequences)


def test_rows_of_different_length_are_selected_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 11, generator=generator)
    ids = torch.randint(0, 11, (3, 30), generator=generator)
    last = torch.tensor([[2], [17], [4]])
    processors = LogitsProcessorList([BansBySum()])
    tokens, _ = GreedySelection(ProcessedScores(processors, logits.device)).verify(
        logits, ids, last
    )
    for row in range(3):
        for i in range(4):
            context = ids[row : row + 1, : int(last[row]) + i + 1]
            expected = BansBySum()(context, logits[row, i : i + 1]).argmax()
            assert tokens[row, i] == expected


def test_without_processors_the_largest_logit_is_selected() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0], [5.0, 5.0, 1.0]]], dtype=torch.bfloat16)
    last = torch.zeros(1, 1, dtype=torch.int64)
    scores = ProcessedScores(LogitsProcessorList(), logits.device)
    selected, _ = GreedySelection(scores).verify(logits, torch.zeros(1, 3), last)
    assert selected.tolist() == [[1, 0]]


def test_allowed_tokens_by_prefix() -> None:
    model = nested_model()

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        start = int(ids.sum()) % 20
        return list(range(start, start + 30))

    tokens = small_models.tokens(model, 2, 9)
    expected = run(model, tokens[:1], gamma=0, prefix_allowed_tokens_fn=allowed).sequences
    output = run(model, tokens[:1], gamma=4, prefix_allowed_tokens_fn=allowed).sequences
    assert torch.equal(output, expected)
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn needs batch size 1, got 2"):
        run(model, tokens, gamma=4, prefix_allowed_tokens_fn=allowed)


def test_a_processor_with_state_is_refused() -> None:
    config = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=5)
    model = nested_model()
    with pytest.raises(ValueError, match="SynthID is not supported"):
        run(model, small_models.tokens(model, 1, 9), gamma=2, watermarking_config=config)
