"""How many draft tokens are accepted: measured on prompts, or drawn at a given rate."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection

_BISECTIONS = 60


@dataclass(frozen=True)
class Acceptance:
    """Share of draft tokens that are kept.

    Attributes:
        kind: ``"measured"``, in speculative decoding of prompts, or ``"synthetic"``: drawn.
        gamma: draft tokens a round.
        slot: accepted draft tokens / all draft tokens.
        per_token: for a synthetic one, probability of accepting a draft token after accepted ones.
        context: for a measured one, mean tokens before a draft token, about.
    """

    kind: Literal["measured", "synthetic"]
    gamma: int
    slot: float
    per_token: float | None = None
    context: int | None = None

    @classmethod
    def synthetic(cls, slot: float, gamma: int) -> "Acceptance":
        """Draft tokens are accepted at random, so that the mean is ``slot``."""
        return cls("synthetic", gamma, slot, per_token_probability(slot, gamma))

    @property
    def tokens_per_round(self) -> float:
        """Accepted draft tokens, and the recovered or bonus token."""
        return 1 + self.gamma * self.slot

    def __str__(self) -> str:
        if self.per_token is not None:
            return f"{self.kind} {self.slot:g} ({self.per_token:.4f} a token)"
        where = "" if self.context is None else f" at {self.context} tokens"
        return f"{self.kind} {self.slot:.4f}{where}"


def check_slot_acceptance(slot: float) -> None:
    """Refuse what is no share of draft tokens."""
    if not 0 <= slot <= 1:
        raise ValueError(f"the synthetic acceptance must be from 0 to 1, got {slot!r}")


def per_token_probability(slot: float, gamma: int) -> float:
    """The a for which ``a + a^2 + ... + a^gamma = gamma * slot``.

    The draft token at position i is kept if it and all before it are accepted: with a ** i.

    Args:
        slot: accepted draft tokens / all draft tokens, 0 to 1.
        gamma: draft tokens a round, at least 1.
    """
    check_slot_acceptance(slot)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, gamma + 1)) < gamma * slot:
            low = middle
        else:
            high = middle
    return high


class SyntheticSelection(GreedySelection):
    """Greedy selection, with all of its work, that then draws which draft tokens are accepted.

    Args:
        scores: as in ``GreedySelection``.
        probability: of accepting a draft token after accepted ones.
    """

    def __init__(self, scores: ProcessedScores, probability: float) -> None:
        super().__init__(scores)
        self.probability = probability

    def verify(
        self, logits: Tensor, ids: Tensor, last: Tensor, drafts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The draft tokens as far as they are accepted, then what the target would choose."""
        tokens, agreed = super().verify(logits, ids, last, drafts)
        drawn: Any = torch.rand(agreed.shape, device=agreed.device) < self.probability
        accepted = drawn.cumprod(1).bool()
        drafted = ids.gather(1, last + torch.arange(1, tokens.shape[1], device=ids.device))
        kept = torch.where(accepted, drafted, tokens[:, :-1])
        return torch.cat((kept, tokens[:, -1:]), dim=1), accepted
