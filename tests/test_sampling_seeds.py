"""Samples are reproduced by their seeds, whatever else a batch holds."""

from typing import Any

import pytest
import small_models
import torch
from speculative_runs import NEW, nested_model, padded_prompts, run
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from nestq.speculative import decode, speculative_generate


def sample(tokens: Tensor, gamma: int = 3, **options: Any) -> Tensor:
    """Prompts and new tokens."""
    return run(nested_model(), tokens, gamma, do_sample=True, **options).sequences


def prompt(batch: int = 1) -> Tensor:
    return small_models.tokens(nested_model(), batch, 9)


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_seed_reproduces_a_run(gamma: int) -> None:
    first = sample(prompt(2), gamma, seed=5)
    assert torch.equal(sample(prompt(2), gamma, seed=5), first)
    assert not torch.equal(sample(prompt(2), gamma, seed=6), first)
    assert not torch.equal(sample(prompt(2), gamma, seed=5 + 2**63), first)


def test_the_default_generator_and_others_give_seeds() -> None:
    torch.manual_seed(3)
    first, second = sample(prompt()), sample(prompt())
    torch.manual_seed(3)
    assert torch.equal(sample(prompt()), first)
    assert torch.equal(sample(prompt()), second)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(sample(prompt(), generator=generator), first)
    assert torch.equal(sample(prompt(), generator=generator), second)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "seed": 3}])
def test_the_default_generator_is_left_alone(options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    run(nested_model(), prompt(), 3, **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_greedy_decoding_takes_a_seed_and_has_no_use_for_it() -> None:
    expected = run(nested_model(), prompt(), 3).sequences
    assert torch.equal(run(nested_model(), prompt(), 3, seed=7).sequences, expected)


def test_rows_of_one_prompt_differ() -> None:
    rows = sample(prompt(), num_return_sequences=5, seed=1)
    assert rows.shape == (5, 9 + NEW)
    assert len({tuple(row) for row in rows.tolist()}) == 5
    # What is sampled for the first does not depend on how many there are.
    assert torch.equal(sample(prompt(), seed=1)[0], rows[0])
    same = sample(prompt(), num_return_sequences=3, seed=[8, 8, 9])
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_sequences_of_each_prompt_lie_together() -> None:
    tokens = prompt(2)
    rows = sample(tokens, num_return_sequences=2, seed=[1, 2, 3, 4])
    assert torch.equal(rows[:, :9], tokens.repeat_interleave(2, 0))
    for row in range(4):
        alone = sample(tokens[row // 2 : row // 2 + 1], seed=row + 1)
        assert torch.equal(rows[row], alone[0])


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "repetition_penalty": 1.3}])
def test_a_row_of_a_padded_batch_is_its_prompt_alone(gamma: int, options: dict[str, Any]) -> None:
    model = nested_model()
    pads, seeds = [0, 3, 6, 1], [11, 2**64 - 1, 0, 7]
    tokens, mask = padded_prompts(model, pads, 9)
    end = list(range(1, 97, 12))  # rows end at different lengths
    options = {"eos_token_id": end, "max_new_tokens": 30, **options}
    together = sample(tokens, gamma, attention_mask=mask, seed=seeds, **options)
    lengths = set()
    for row, (pad, seed) in enumerate(zip(pads, seeds, strict=True)):
        alone = sample(tokens[row : row + 1, pad:], gamma, seed=seed, **options)[0]
        lengths.add(len(alone))
        assert torch.equal(together[row, pad : pad + len(alone)], alone)
        assert not together[row, pad + len(alone) :].any()
    assert len(lengths) > 1


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_longer_run_begins_as_a_shorter_one(gamma: int) -> None:
    long = sample(prompt(2), gamma, seed=2, max_new_tokens=20)
    for length in (1, 2, 7, 13):
        short = sample(prompt(2), gamma, seed=2, max_new_tokens=length)
        assert torch.equal(short, long[:, : 9 + length])


def test_without_drafts_a_run_can_be_resumed() -> None:
    whole = sample(prompt(), gamma=0, seed=2, max_new_tokens=20)
    resumed = sample(whole[:, :17], gamma=0, seed=2, max_new_tokens=12)
    assert torch.equal(resumed, whole)


def test_transformers_generate_samples_the_same() -> None:
    model, tokens = nested_model(), prompt(2)
    wanted = {"temperature": 0.6, "top_p": 0.9, "num_return_sequences": 2, "max_new_tokens": 12}
    config = GenerationConfig(do_sample=True, **wanted)
    options: dict[str, Any] = {"generation_config": config, "gamma": 3, "seed": 4}
    ours = speculative_generate(model, tokens, **options)
    theirs = model.generate(tokens, custom_generate=decode, **options)
    assert ours.shape == (4, 21)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, sample(tokens, seed=4, **wanted))


def test_a_very_low_temperature_is_greedy() -> None:
    greedy = run(nested_model(), prompt(2), 3).sequences
    assert torch.equal(sample(prompt(2), temperature=1e-6), greedy)
    assert torch.equal(sample(prompt(2), top_k=1), greedy)


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="strictly positive float"):
        sample(prompt(), temperature=0.0)


def test_samples_are_streamed() -> None:
    class Columns(BaseStreamer):
        def __init__(self) -> None:
            self.columns: list[Tensor] = []

        def put(self, value: Tensor) -> None:
            self.columns.append(value)

        def end(self) -> None:
            """Nothing is kept back."""

    streamer = Columns()
    tokens = prompt(2)
    output = sample(tokens, seed=3, streamer=streamer)
    assert torch.equal(torch.stack(streamer.columns[1:], 1), output[:, 9:])


def test_scores_of_nan_are_an_error() -> None:
    model = nested_model()

    def spoil(module: Any, args: Any, output: Any) -> None:
        output.logits[1] = torch.nan

    handle = model.register_forward_hook(spoil)
    try:
        with pytest.raises(ValueError, match=r"no token can be chosen: .* in row\(s\) 1;"):
            sample(prompt(2))
    finally:
        handle.remove()
