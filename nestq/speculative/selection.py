"""From logits to tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList


class GreedySelection:
    """The most likely token at each position, after transformers' logits processors.

    The processors see a position's own context: the prompt as given, padding included, and what was
    generated or drafted before it. They must be functions of that alone, because draft and target
    both call them, and rejected tokens are forgotten.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors

    def __call__(self, logits: Tensor, ids: Tensor, last: Tensor) -> Tensor:
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
