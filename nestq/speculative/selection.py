"""From logits to tokens."""

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from nestq.speculative.scores import ProcessedScores


class Selection(Protocol):
    """Chooses draft tokens and judges them. One object serves one call."""

    key: Hashable
    """What a captured graph depends on; the rest are tensors, which ``begin`` sets."""

    def begin(self, other: Any) -> None:
        """Start a call with the tensors of another selection of the same kind and key."""

    def draft(self, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
        """A draft token ``[B, 1]`` to follow a column.

        Args:
            logits: ``[B, 1, V]``, the draft's.
            ids: int64 ``[B, columns]``, read up to ``column``.
            column: int64 ``[B, 1]``.
        """

    def verify(self, logits: Tensor, ids: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """What follows the columns ``last + 0 ... last + gamma``, and which drafts are accepted.

        Args:
            logits: ``[B, gamma + 1, V]``, the target's.
            ids: int64 ``[B, columns]``, with the draft tokens in the columns after ``last``.
            last: int64 ``[B, 1]``.

        Returns:
            tokens int64 ``[B, gamma + 1]``: equal to the draft tokens as far as these are accepted,
            then the recovered or bonus token; what is behind that is not used. accepted bool
            ``[B, gamma]``: true up to the first draft token that is rejected.
        """


class GreedySelection:
    """The most likely token at each position, after transformers' logits processors.

    Args:
        scores: applies the processors, for draft and target alike.
    """

    def __init__(self, scores: ProcessedScores) -> None:
        self.scores = scores
        self.key: Hashable = ("greedy", scores.key)

    def begin(self, other: "GreedySelection") -> None:
        """Start a call with the tensors of another selection of the same key."""
        self.scores.begin(other.scores)

    def draft(self, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
        """The draft's most likely token ``[B, 1]``."""
        return self.scores(logits, ids, column).argmax(-1)

    def verify(self, logits: Tensor, ids: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The target's most likely tokens; drafts are accepted as far as they are the same."""
        tokens = self.scores(logits, ids, last).argmax(-1)
        drafted = ids.gather(1, last + torch.arange(1, tokens.shape[1], device=ids.device))
        return tokens, (drafted == tokens[:, :-1]).cumprod(1).bool()
