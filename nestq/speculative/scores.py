"""Scores that tokens are chosen by: logits after transformers' logits processors."""

from collections.abc import Hashable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# Functions of the scores alone that never wait for the device. EtaLogitsWarper and TopHLogitsWarper
# are not here: they validate the arguments of a torch.distributions.Categorical, on the host.
_OF_SCORES_ALONE = (
    EpsilonLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class ProcessedScores:
    """Applies logits processors at several positions, each with its own context.

    A context is the prompt as given, padding included, and what was generated or drafted before the
    position. Processors must be functions of that and of the scores, because draft and target both
    call them, and rejected tokens are forgotten.

    Args:
        processors: in the order in which they are applied.
        device: of the logits.
        hidden: columns of ids, from 0 on, that are no context: of a prompt of embeddings alone.

    Attributes:
        waits: whether the host waits for the device in between, so that no graph can be captured.
            It does unless every processor is a temperature, top-k, top-p, min-p, typical or epsilon
            warper, a normalization or a repetition penalty.
        key: what a captured graph depends on.
    """

    def __init__(
        self, processors: LogitsProcessorList, device: torch.device, hidden: int = 0
    ) -> None:
        self.processors = processors
        self._hidden = hidden
        known = (*_OF_SCORES_ALONE, RepetitionPenaltyLogitsProcessor)
        self.waits = not all(type(processor) in known for processor in processors)
        self._starts = [_penalty_start(processor, device) + hidden for processor in processors]
        self.key: Hashable = None
        if not self.waits:
            constants = [_constants(processor) for processor in processors]
            self.key = tuple(zip(constants, map(len, self._starts), strict=True))

    def begin(self, other: "ProcessedScores") -> None:
        """Take over the tensors of another object with the same key."""
        for start, new in zip(self._starts, other._starts, strict=True):
            start.copy_(new)

    def __call__(self, logits: Tensor, ids: Tensor, last: Tensor) -> Tensor:
        """Scores, float32 ``[B, n, V]``.

        Args:
            logits: ``[B, n, V]``, for what follows the columns ``last + 0 ... last + n - 1``.
            ids: int64 ``[B, columns]``; columns up to ``last + n - 1`` are read.
            last: int64 ``[B, 1]``, column of the token that the first logits come from.
        """
        if self.waits:
            return self._length_by_length(logits, ids, last)
        scores = logits.float()
        for processor, start in zip(self.processors, self._starts, strict=True):
            if isinstance(processor, RepetitionPenaltyLogitsProcessor):
                scores = _penalize_repetition(scores, ids, last, start, processor.penalty)
            else:
                context: Any = ids  # not looked at
                scores = processor(context, scores.flatten(0, 1)).view_as(scores)
        return scores

    def _length_by_length(self, logits: Tensor, ids: Tensor, last: Tensor) -> Tensor:
        batch, count, _ = logits.shape
        rows = torch.arange(batch, device=logits.device)
        shortest = last[:, 0] + 1
        processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        # Rows differ in length. Some processors know rows by their index, so that every call has
        # all rows; those that have no position of this length give a result that is not used.
        for length in range(int(shortest.min()), int(shortest.max()) + count):
            offset = length - shortest
            here = (offset >= 0) & (offset < count)
            if here.any():
                context: Any = ids[:, self._hidden : length]
                scores = logits[rows, offset.clamp(0, count - 1)].float()
                processed[rows[here], offset[here]] = self.processors(context, scores)[here]
        return processed


def _constants(processor: LogitsProcessor) -> Hashable:
    """A processor's type and numbers."""
    numbers = {
        name: float(value)
        for name, value in vars(processor).items()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0)
    }
    numbers.pop("prompt_ignore_length", None)
    return type(processor), tuple(sorted(numbers.items()))


def _penalty_start(processor: LogitsProcessor, device: torch.device) -> Tensor:
    """First column that a repetition penalty looks at, int64 ``[B or 1, 1]``; 0 for others."""
    start = getattr(processor, "prompt_ignore_length", None)
    return torch.as_tensor(0 if start is None else start).to(device, torch.int64).reshape(-1, 1)


def _penalize_repetition(
    scores: Tensor, ids: Tensor, last: Tensor, start: Tensor, penalty: float
) -> Tensor:
    """What ``RepetitionPenaltyLogitsProcessor`` gives, at all positions of all rows at once."""
    batch, count, vocabulary = scores.shape
    columns = torch.arange(ids.shape[1], device=ids.device)
    ends = last + torch.arange(count, device=ids.device)
    seen = (columns >= start)[:, None] & (columns <= ends[..., None])
    # One more token than there are takes what is not seen, and ids that the head has no score for.
    tokens = ids.clamp(max=vocabulary)[:, None].masked_fill(~seen, vocabulary)
    repeated = torch.zeros(
        batch, count, vocabulary + 1, dtype=torch.bool, device=scores.device
    ).scatter_(2, tokens, True)
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(repeated[..., :vocabulary], penalized, scores)
