"""Drafts that end where the draft is not sure of what it says."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nestq.speculative.round import Drafts, NestedForward, Round
from nestq.speculative.selection import Selection
from nestq.speculative.state import DecodingState


class StoppingRound(Round):
    """A round in which a row's drafts end behind a token that the draft gave a low probability.

    The uncertain token itself is verified like the ones before it. Sampling stays exact. Whether a
    row drafts at a position follows from the tokens before it and their probabilities. Given these,
    a draft token there is sampled from q as always, and accepting or replacing it gives the
    target's p; without one the token is sampled from p. Both give p, so that the choice between
    them does not matter. To drop the uncertain token would not be exact: then the choice would
    depend on the very token that it is about.

    The host waits for every draft step, so that this cannot be part of a CUDA graph.

    Args:
        model: as in :class:`Round`, like the next four.
        state: what the round reads and writes.
        gamma: draft tokens at most.
        selection: how tokens are chosen.
        watch: a context for each phase.
        least: probability from 0 to 1; what is below it ends a row's drafts.
    """

    def __init__(
        self,
        model: NestedForward,
        state: DecodingState,
        gamma: int,
        selection: Selection,
        watch: Callable[[str], AbstractContextManager[None]],
        least: float,
    ) -> None:
        super().__init__(model, state, gamma, selection, watch)
        self.least = least

    def draft(self, last: Tensor) -> Drafts:
        """Draft until every row has ended; rows that have ended go along and count no more."""
        drafting = ~self.state.finished[:, None]
        per_row = torch.zeros_like(last)
        for step in range(self.gamma):
            if not drafting.any():
                return Drafts(step, per_row)
            probability = self.draft_token(last + step)
            per_row += drafting
            # Not where the probability is NaN, either.
            drafting = drafting & (probability >= self.least)
        return Drafts(self.gamma, per_row)

    def draft_token(self, column: Tensor) -> Tensor:
        """Draft the token behind a column ``[B, 1]``; its probability, float64 ``[B, 1]``."""
        ids = self.state.ids
        logits = self.model("draft", ids.gather(1, column), column)
        token = self.selection.draft(logits, ids, column)
        ids.scatter_(1, column + 1, token)
        return self.selection.draft_probability(logits, ids, column, token)
