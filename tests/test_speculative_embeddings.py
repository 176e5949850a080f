"""Prompts of embeddings, which transformers takes in place of token ids."""

from typing import Any

import pytest
import torch
from speculative_runs import nested_model, padded_prompts, run
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from nestq.speculative import decode, speculative_generate

MODEL = nested_model()
TOKENS, MASK = padded_prompts(MODEL, [0, 3], 8)
EMBEDDINGS: Tensor = MODEL.get_input_embeddings()(TOKENS).detach()


class Ends(StoppingCriteria):
    """Ends a row at its sixth token, prompt included where it is of token ids."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 6)


@pytest.mark.parametrize("gamma", [0, 1, 4, "auto"])
def test_embeddings_of_tokens_give_the_new_tokens_alone(gamma: Any) -> None:
    expected = run(MODEL, TOKENS, 0, attention_mask=MASK).sequences[:, 8:]
    output = run(MODEL, None, gamma, inputs_embeds=EMBEDDINGS, attention_mask=MASK)
    assert torch.equal(output.sequences, expected)
    assert output.metrics.tokens == expected.numel()
    theirs = MODEL.generate(
        inputs_embeds=EMBEDDINGS,
        attention_mask=MASK,
        custom_generate=decode,
        gamma=gamma,
        max_new_tokens=16,
    )
    assert torch.equal(theirs, expected)


@pytest.mark.parametrize("gamma", [0, 3])
def test_token_ids_may_come_with_their_embeddings(gamma: int) -> None:
    """Then they are in the output, and context to processors."""
    options: dict[str, Any] = {"attention_mask": MASK, "repetition_penalty": 1.5}
    expected = run(MODEL, TOKENS, 0, **options).sequences
    output = run(MODEL, TOKENS, gamma, inputs_embeds=EMBEDDINGS, **options).sequences
    assert torch.equal(output, expected)
    others = run(MODEL, TOKENS, gamma, inputs_embeds=EMBEDDINGS.flip(2), **options).sequences
    assert not torch.equal(others[:, 8:], expected[:, 8:])


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}])
def test_processors_see_new_tokens_only(options: dict[str, Any]) -> None:
    """The first token has no context, the second one the first, and so on, as in transformers."""
    kept: dict[str, Any] = {"output_scores": True, "output_logits": True}
    with pytest.warns(UserWarning, match="only to newly generated tokens"):
        output = run(MODEL, None, 3, inputs_embeds=EMBEDDINGS, **kept, **options)
    with pytest.warns(UserWarning, match="only to newly generated tokens"):
        alone = run(MODEL, None, 0, inputs_embeds=EMBEDDINGS, **options)
    assert torch.equal(output.sequences, alone.sequences)
    for step in range(4):
        changed = (output.scores[step] != output.logits[step]).nonzero().tolist()
        context = [sorted(set(row[:step].tolist())) for row in output.sequences]
        assert changed == [[row, token] for row in range(2) for token in context[row]]


@pytest.mark.parametrize("gamma", [0, 3])
def test_stopping(gamma: int) -> None:
    criteria = StoppingCriteriaList([Ends()])
    options: dict[str, Any] = {"inputs_embeds": EMBEDDINGS, "attention_mask": MASK}
    whole = run(MODEL, None, gamma, **options).sequences
    assert torch.equal(
        run(MODEL, None, gamma, stopping_criteria=criteria, **options).sequences, whole[:, :6]
    )
    one = run(MODEL, None, gamma, max_new_tokens=1, **options)
    assert torch.equal(one.sequences, whole[:, :1])
    assert (one.metrics.tokens, one.metrics.rounds) == (2, 0)
    # Of prompt and new tokens together, as in transformers.
    length = run(MODEL, None, gamma, max_new_tokens=None, max_length=13, **options)
    assert torch.equal(length.sequences, whole[:, :5])
    end = int(whole[0, 0])
    ended = run(MODEL, None, gamma, eos_token_id=end, **options).sequences
    assert ended[0].tolist() == [end] + [0] * (ended.shape[1] - 1)


def test_the_length_of_the_context() -> None:
    long = EMBEDDINGS[:1, :1].expand(1, 500, -1)
    assert run(MODEL, None, 2, inputs_embeds=long, max_new_tokens=2).sequences.shape == (1, 2)
    with pytest.raises(ValueError, match="prompt and new tokens may be 513 together"):
        run(MODEL, None, 2, inputs_embeds=long, max_new_tokens=13)


@pytest.mark.parametrize(
    ("embeddings", "options", "message"),
    [
        (torch.zeros(2, 8), {}, r"\[batch, tokens, 48\], got torch.float32 of shape \(2, 8\)"),
        (torch.zeros(2, 8, 47), {}, r"got torch.float32 of shape \(2, 8, 47\)"),
        (torch.zeros(2, 8, 48).int(), {}, "got torch.int32 of shape"),
        ([[1.0]], {}, r"got \[\[1.0\]\]"),
        (torch.zeros(2, 8, 48, device="meta"), {}, "inputs_embeds must hold numbers"),
        (EMBEDDINGS, {"attention_mask": MASK[:, 1:]}, "attention_mask must have the shape of"),
        (EMBEDDINGS, {"inputs": TOKENS[:, 1:]}, "inputs_embeds must stand for the whole prompt"),
        (EMBEDDINGS, {"prefill_chunk_size": 3}, "prefill_chunk_size=3 is not supported with"),
        (torch.full_like(EMBEDDINGS, torch.nan), {}, r"no token can be chosen: .* row\(s\) 0, 1;"),
    ],
)
def test_what_is_refused(embeddings: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculative_generate(MODEL, inputs_embeds=embeddings, max_new_tokens=3, **options)
