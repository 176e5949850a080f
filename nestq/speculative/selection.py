"""From logits to tokens."""

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from nestq.speculative.scores import ProcessedScores

# In place of a token that cannot be chosen: no id, so that it is never taken for a choice.
UNDEFINED = -2


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

    def draft_probability(
        self, logits: Tensor, ids: Tensor, column: Tensor, token: Tensor
    ) -> Tensor:
        """The draft's probability of the token ``[B, 1]`` that it drafted last, float64 ``[B, 1]``.

        Arguments are those that ``draft`` was given, and what it returned.
        """

    def verify(
        self, logits: Tensor, ids: Tensor, last: Tensor, drafts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What follows the columns ``last + 0 ... last + gamma``, and which drafts are accepted.

        Args:
            logits: ``[B, gamma + 1, V]``, the target's.
            ids: int64 ``[B, columns]``, with the draft tokens in the columns after ``last``.
            last: int64 ``[B, 1]``.
            drafts: int64 ``[B, 1]``, draft tokens of each row, which ends behind them; None if each
                has gamma.

        Returns:
            tokens int64 ``[B, gamma + 1]``: equal to the draft tokens as far as these are accepted,
            then the recovered or bonus token, which is ``UNDEFINED`` where the scores allow no
            choice; what is behind that is not used. accepted bool ``[B, gamma]``: true up to the
            first draft token that is rejected.
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

    def draft_probability(
        self, logits: Tensor, ids: Tensor, column: Tensor, token: Tensor
    ) -> Tensor:
        """The probability that the draft's scores give the token."""
        scores = self.scores(logits, ids, column)[:, 0].double()
        return scores.softmax(-1).gather(1, token)

    def verify(
        self, logits: Tensor, ids: Tensor, last: Tensor, drafts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The target's most likely tokens; drafts are accepted as far as they are the same."""
        scores = self.scores(logits, ids, last)
        tokens = scores.argmax(-1, keepdim=True)
        # NaN is the largest of all to argmax; where all are -inf, no token is left.
        best = scores.gather(-1, tokens)
        tokens = torch.where(best > -torch.inf, tokens, UNDEFINED)[..., 0]
        offsets = torch.arange(1, tokens.shape[1], device=ids.device)
        same = ids.gather(1, last + offsets) == tokens[:, :-1]
        if drafts is not None:
            same = same & (offsets <= drafts)
        return tokens, same.cumprod(1).bool()
