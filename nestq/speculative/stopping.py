"""Where a sequence ends inside a block of accepted tokens."""

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)


class Stopping:
    """Transformers' stopping criteria, applied to every token of a block in order.

    Maximum length and end-of-sequence tokens are found on the device for the whole batch. Other
    criteria are called as in one-by-one decoding: on the ids of one row, after each of its tokens,
    with ``scores=None``.

    Attributes:
        max_length: columns that a sequence may have, prompt and padding included.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        if not lengths:
            raise ValueError("stopping_criteria must hold a MaxLengthCriteria, got none")
        self.max_length = min(lengths)
        eos = [torch.atleast_1d(c.eos_token_id) for c in criteria if type(c) is EosTokenCriteria]
        self._eos = torch.cat(eos) if eos else None
        known = (MaxLengthCriteria, EosTokenCriteria)
        self._others = StoppingCriteriaList([c for c in criteria if type(c) not in known])

    @property
    def rows_end_together(self) -> bool:
        """Whether only the maximum length ends a sequence."""
        return self._eos is None and not self._others

    def __call__(
        self, ids: Tensor, tokens: Tensor, last: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How many tokens of a block each row keeps, and whether it ends there.

        Args:
            ids: int64 ``[B, columns]``, with ``tokens`` in the columns after ``last``.
            tokens: int64 ``[B, n]``.
            last: int64 ``[B, 1]``, column of the last token before the block.
            count: int64 ``[B]``, tokens that the row offers, 0 to n.

        Returns:
            kept int64 ``[B]`` up to ``count``, and ended bool ``[B]``.
        """
        room = self.max_length - 1 - last[:, 0]
        kept = torch.minimum(count, room)
        ended = kept == room
        if self._eos is not None:
            is_eos = torch.isin(tokens, self._eos.to(tokens.device))
            # Tokens up to and including the first end-of-sequence token.
            through_eos = (is_eos.cumsum(1) - is_eos.long() == 0).sum(1)
            ended = torch.where(is_eos.any(1) & (through_eos <= kept), True, ended)
            kept = torch.minimum(kept, through_eos)
        if self._others:
            self._apply_others(ids, last, kept, ended)
        return kept, ended

    def _apply_others(self, ids: Tensor, last: Tensor, kept: Tensor, ended: Tensor) -> None:
        """Shorten ``kept`` in place where another criterion ends the row earlier."""
        for row, (column, count) in enumerate(zip(last[:, 0].tolist(), kept.tolist(), strict=True)):
            for n in range(1, count + 1):
                if self._others(ids[row : row + 1, : column + n + 1], None):
                    kept[row], ended[row] = n, True
                    break
