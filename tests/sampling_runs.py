"""A tiny model to sample from, the exact distribution of what it generates, chi-square tests."""

from functools import cache
from typing import Any

import small_models
import torch
from nested_models import nest_
from speculative_runs import padded_prompts, run
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

VOCABULARY = 6
NEW = 6
EXACT = 4  # new tokens whose joint distribution is computed
# Tests that compare distributions, at most. All together raise a false alarm, over the choice of
# seeds, with a probability of 1e-6; with the seeds that they have they give the same every time.
TESTS = 1000
LEAST_P = 1e-6 / TESTS


@cache
def tiny_model() -> PreTrainedModel:
    """Six tokens; draft and target differ clearly, because the refinement is random."""
    model = small_models.build(
        "llama-gqa",
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    nest_(model, overlap=4).generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if isinstance(weight, NestedQuantTensor):
            codes = torch.randint(256, weight.refinement.shape, generator=generator)
            weight.refinement.copy_(codes)
    return model


@torch.no_grad()
def distance(model: PreTrainedModel) -> float:
    """Total variation distance of draft and target, averaged over random contexts."""
    views: list[Any] = ["draft", "target"]
    both = []
    for view in views:
        with nest_view(view):
            both.append(model(small_models.tokens(model, 64, 8)).logits.softmax(-1))
    return float((both[0] - both[1]).abs().sum(-1).mean() / 2)


class Presence(LogitsProcessor):
    """Lowers the scores of tokens that the context has, and forbids any after token 5 but three."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        seen = torch.zeros_like(scores).scatter(1, input_ids[:, 5:], 1.0)
        scores = scores - 1.5 * seen
        after = (input_ids[:, -1:] == 5) & (torch.arange(VOCABULARY) < 3)
        return scores.masked_fill(after, -torch.inf)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "low temperature": {"temperature": 0.5},
    "top k": {"top_k": 2},
    "top p": {"top_p": 0.7},
    "min p": {"min_p": 0.3},
    "typical p": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.15},
    "eta": {"eta_cutoff": 0.4},
    "top h": {"top_h": 0.6},
    "repetition penalty": {"repetition_penalty": 1.8},
    "presence": {"logits_processor": LogitsProcessorList([Presence()])},
    "bad words": {"bad_words_ids": [[2], [1, 4]]},
    "a forced end": {"forced_eos_token_id": 3, "eos_token_id": 3, "max_new_tokens": EXACT},
    "no early end": {"min_new_tokens": 3, "eos_token_id": 3},
    "several": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3},
}


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Prompts ``[batch, 5]`` of different lengths, left-padded, and their mask."""
    return padded_prompts(tiny_model(), [0, 2, 1, 3][:batch], 5)


def samples(setting: str, gamma: Any, batch: int, count: int, seed: int, **others: Any) -> Tensor:
    """New tokens, int64 ``[batch, count, n]``."""
    tokens, mask = prompts(batch)
    options = {"max_new_tokens": NEW, **SETTINGS[setting], **others}
    output = run(
        tiny_model(),
        tokens,
        gamma,
        attention_mask=mask,
        do_sample=True,
        num_return_sequences=count,
        seed=seed,
        **options,
    )
    length = options["max_new_tokens"]
    new = output.sequences[:, 5:]
    new = torch.nn.functional.pad(new, (0, length - new.shape[1]))
    return new.reshape(batch, count, length)


@cache
def target_samples(setting: str, batch: int, count: int) -> Tensor:
    """Samples of the target alone."""
    return samples(setting, 0, batch, count, seed=987)


def cells(new: Tensor) -> Tensor:
    """One number for each row of tokens ``[..., n]``."""
    powers = VOCABULARY ** torch.arange(new.shape[-1])
    return (new * powers).sum(-1)


@cache
def exact(setting: str, prompt: int) -> Tensor:
    """Probabilities of the first ``EXACT`` new tokens, by their cell, float64.

    The target's logits after every possible beginning, through the processors that transformers
    makes for the call, applied as it does.
    """
    model = tiny_model()
    tokens, mask = (part[prompt : prompt + 1] for part in prompts(4))
    options = {"max_new_tokens": NEW, **SETTINGS[setting]}
    end = options.get("eos_token_id")
    beginnings, probabilities = torch.zeros(1, 0, dtype=torch.int64), torch.ones(1).double()
    for _ in range(EXACT):
        count = len(beginnings)
        contexts = torch.cat((tokens.expand(count, -1), beginnings), 1)
        masks = torch.cat((mask.expand(count, -1), torch.ones_like(beginnings)), 1)
        processors = processors_of(model, tokens, mask, count, options)
        scores = processors(contexts, target_logits(model, contexts, masks).float())
        following = scores.double().softmax(-1)
        if end is not None:
            ended = (beginnings == end).any(1)
            following[ended] = torch.eye(VOCABULARY).double()[0]  # the pad token
        probabilities = (probabilities[:, None] * following).flatten()
        beginnings = torch.cat(
            (
                beginnings.repeat_interleave(VOCABULARY, 0),
                torch.arange(VOCABULARY).repeat(count)[:, None],
            ),
            1,
        )
    return torch.zeros_like(probabilities).scatter_(0, cells(beginnings), probabilities)


def processors_of(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, count: int, options: dict[str, Any]
) -> LogitsProcessorList:
    """What transformers would call for ``count`` sequences that are sampled from a prompt."""
    caught: list[LogitsProcessorList] = []

    def catch(model: Any, input_ids: Any, logits_processor: Any, **_: Any) -> Any:
        caught.append(logits_processor)

    model.generate(
        tokens,
        attention_mask=mask,
        custom_generate=catch,
        do_sample=True,
        num_return_sequences=count,
        **options,
    )
    return caught[0]


def target_logits(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> Tensor:
    """Logits ``[B, V]`` of the next token, by the engine's own forward pass."""
    caught: list[Tensor] = []
    handle = model.register_forward_hook(lambda *parts: caught.append(parts[-1].logits))
    run(model, tokens, 0, attention_mask=mask, max_new_tokens=1)
    handle.remove()
    return caught[-1][:, -1]


def chi_square_p(statistic: float, freedom: int) -> float:
    """Probability of at least this statistic."""
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _merged(counts: Tensor, expected: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """The cells with at least this expectation, and one that holds the rest."""
    large = expected >= least
    rest = expected[~large].sum()
    if 0 < rest < least:  # too few for a cell: with the smallest of the others
        smallest = torch.where(large, expected, torch.inf).argmin()
        large[smallest] = False
    merged = [torch.cat((c[large], c[~large].sum()[None])) for c in (counts, expected)]
    keep = merged[1] > 0
    return merged[0][keep], merged[1][keep]


def fit_p(new: Tensor, setting: str) -> float:
    """p-value of samples ``[batch, count, n]`` under the exact distribution, by chi-square."""
    statistic, freedom = 0.0, 0
    for prompt, rows in enumerate(new):
        probabilities = exact(setting, prompt)
        counts = cells(rows[:, :EXACT]).bincount(minlength=len(probabilities)).double()
        if counts[probabilities == 0].any():
            return 0.0  # what cannot be was seen
        seen, expected = _merged(counts, probabilities * len(rows), least=10)
        statistic += float(((seen - expected) ** 2 / expected).sum())
        freedom += len(seen) - 1
    return chi_square_p(statistic, freedom)


def same_p(new: Tensor, other: Tensor) -> float:
    """p-value of samples ``[batch, count, n]`` of one distribution, by two-sample chi-square.

    It looks at the last three tokens of each.
    """
    statistic, freedom = 0.0, 0
    for ours, theirs in zip(new, other, strict=True):
        counts = [
            cells(rows[:, -3:]).bincount(minlength=VOCABULARY**3).double()
            for rows in (ours, theirs)
        ]
        both = counts[0] + counts[1]
        first, total = _merged(counts[0], both, least=20)
        statistic += float(((2 * first - total) ** 2 / total).sum())
        freedom += len(total) - 1
    return chi_square_p(statistic, freedom)
