"""Logits processors at several positions at once, and length by length."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from nestq.speculative.scores import ProcessedScores

CPU = torch.device("cpu")
VOCABULARY = 50

AT_ONCE: dict[str, Callable[[], list[LogitsProcessor]]] = {
    "none": list,
    "temperature": lambda: [TemperatureLogitsWarper(0.7)],
    "top k": lambda: [TopKLogitsWarper(5)],
    "top p": lambda: [TopPLogitsWarper(0.8)],
    "min p": lambda: [MinPLogitsWarper(0.1)],
    "typical": lambda: [TypicalLogitsWarper(0.6)],
    "epsilon": lambda: [EpsilonLogitsWarper(0.02)],
    "normalization": lambda: [LogitNormalization()],
    "penalty": lambda: [RepetitionPenaltyLogitsProcessor(1.7)],
    "penalty without the prompt": lambda: [RepetitionPenaltyLogitsProcessor(1.7, 4)],
    "penalty without padding": lambda: [
        RepetitionPenaltyLogitsProcessor(1.7, torch.tensor([0, 3, 5]))
    ],
    "several": lambda: [
        RepetitionPenaltyLogitsProcessor(0.6),
        TemperatureLogitsWarper(1.3),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
    ],
}


def scores_of(*processors: LogitsProcessor) -> ProcessedScores:
    return ProcessedScores(LogitsProcessorList(processors), CPU)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[3, 4, V]``, ids, some that have no logit, and last columns."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 4, VOCABULARY, generator=generator)).to(dtype)
    ids = torch.randint(0, VOCABULARY + 2, (3, 30), generator=generator)
    return logits, ids, torch.tensor([[6], [17], [8]])


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_once_is_what_each_position_gets_alone(name: str, dtype: torch.dtype) -> None:
    logits, ids, last = inputs(dtype)
    before = logits.clone()
    together = scores_of(*AT_ONCE[name]())
    assert not together.waits
    scores = together(logits, ids, last)
    assert scores.dtype == torch.float32
    for row in range(3):
        for i in range(4):
            # As transformers calls them: with all rows, in the same context length.
            length = int(last[row]) + i + 1
            processors = LogitsProcessorList(AT_ONCE[name]())
            alone = processors(ids[:, :length], logits[:, i].float())[row]
            assert torch.equal(scores[row, i], alone)
    assert name == "none" or not torch.equal(scores, logits.float())
    assert torch.equal(logits, before)
    together.waits = True
    assert torch.equal(together(logits, ids, last), scores)


class Own(TemperatureLogitsWarper):
    """Of another type, so that nothing is known about it."""


@pytest.mark.parametrize(
    "processor", [EtaLogitsWarper(0.1), NoRepeatNGramLogitsProcessor(2), Own(0.7)]
)
def test_others_wait_for_the_device(processor: LogitsProcessor) -> None:
    scores = scores_of(TopKLogitsWarper(5), processor)
    assert scores.waits
    assert scores.key is None


def test_keys_tell_what_a_graph_depends_on() -> None:
    keys = [scores_of(*make()).key for make in AT_ONCE.values()]
    keys += [
        scores_of(*processors).key
        for processors in (
            [TemperatureLogitsWarper(0.8)],
            [TopKLogitsWarper(6)],
            [TopKLogitsWarper(5, filter_value=-1e9)],
            [TopKLogitsWarper(5), TopPLogitsWarper(0.8)],
            [TopPLogitsWarper(0.8), TopKLogitsWarper(5)],
            [RepetitionPenaltyLogitsProcessor(1.8)],
        )
    ]
    # Where a penalty begins is a tensor, which calls set.
    assert scores_of(*AT_ONCE["penalty"]()).key == (
        scores_of(*AT_ONCE["penalty without the prompt"]()).key
    )
    assert len(set(keys)) == len(keys) - 1
    assert scores_of(*AT_ONCE["several"]()).key == scores_of(*AT_ONCE["several"]()).key


def test_a_call_takes_over_where_penalties_begin() -> None:
    logits, ids, last = inputs()
    kept, new = (
        scores_of(RepetitionPenaltyLogitsProcessor(1.7, torch.tensor(starts)))
        for starts in ([0, 0, 0], [5, 12, 7])
    )
    before = kept(logits, ids, last)
    kept.begin(new)
    assert torch.equal(kept(logits, ids, last), new(logits, ids, last))
    assert not torch.equal(kept(logits, ids, last), before)
