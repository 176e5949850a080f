"""From logits to tokens."""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList


class Selection(Protocol):
    """Chooses draft tokens and judges them. One object serves one call."""

    waits: bool
    """Whether the host waits for the device in between, so that no graph can be captured."""

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

    The processors see a position's own context: the prompt as given, padding included, and what was
    generated or drafted before it. They must be functions of that alone, because draft and target
    both call them, and rejected tokens are forgotten.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self.waits = bool(processors)

    def draft(self, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
        """The draft's most likely token ``[B, 1]``."""
        return self.most_likely(logits, ids, column)

    def verify(self, logits: Tensor, ids: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The target's most likely tokens; drafts are accepted as far as they are the same."""
        tokens = self.most_likely(logits, ids, last)
        drafted = ids.gather(1, last + torch.arange(1, tokens.shape[1], device=ids.device))
        return tokens, (drafted == tokens[:, :-1]).cumprod(1).bool()

    def most_likely(self, logits: Tensor, ids: Tensor, last: Tensor) -> Tensor:
        """Token ids ``[B, n]`` that follow the columns ``last + 0 ... last + n - 1`` of ``ids``.

        Args:
            logits: ``[B, n, V]``.
            ids: int64 ``[B, columns]``; columns up to ``last + n - 1`` are read.
            last: int64 ``[B, 1]``, column of the token that the first logits come from.
        """
        if not self.processors:
            return logits.float().argmax(-1)
        batch, count, _ = logits.shape
        rows = torch.arange(batch, device=logits.device)
        shortest = last[:, 0] + 1
        tokens = torch.empty(batch, count, dtype=torch.int64, device=logits.device)
        # Rows differ in length. Some processors know rows by their index, so that every call has
        # all rows; those that have no position of this length give a result that is not used.
        for length in range(int(shortest.min()), int(shortest.max()) + count):
            offset = length - shortest
            here = (offset >= 0) & (offset < count)
            if here.any():
                context: Any = ids[:, :length]
                scores = logits[rows, offset.clamp(0, count - 1)].float()
                chosen = self.processors(context, scores).argmax(-1)
                tokens[rows[here], offset[here]] = chosen[here]
        return tokens
