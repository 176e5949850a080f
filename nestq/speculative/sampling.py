"""Sampling: tokens that have exactly the target's distribution, whatever the draft proposes.

Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): the draft
samples a token x from its distribution q; it is accepted with probability min(1, p(x) / q(x)), p
being the target's distribution at that position; at the first rejection a token is sampled from
max(p - q, 0), normalized; if there is none, one more token from p.

Random numbers are a function of the seed, the row's stream, the position and the purpose. A later
round may use a position's numbers again. They are fresh all the same: what was drafted behind the
first rejected token has not influenced anything that is kept.
"""

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nestq.speculative.random_numbers import uniforms
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import UNDEFINED

# What the numbers of a position are for.
DRAFT, ACCEPT, RECOVER, BONUS = range(4)
PURPOSES = 4
# Weights that are summed before their sums are.
BLOCK = 256
_LARGEST = 1 - 2.0**-53


def row_streams(
    seed: int | Sequence[int] | None, generator: torch.Generator | None, batch: int
) -> tuple[list[int], list[int]]:
    """Seeds and streams of the rows of a batch.

    Args:
        seed: 64 bits, for all rows, which then have the streams 0, 1, 2, ...; or one for each row,
            which then has stream 0; or None to draw one for all rows.
        generator: to draw it from; None for PyTorch's default one.
        batch: number of rows.
    """
    if isinstance(seed, Sequence):
        return list(seed), [0] * batch
    if seed is None:
        device = None if generator is None else generator.device
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=device))
    return [seed] * batch, list(range(batch))


def random_table(streams: tuple[list[int], list[int]], columns: int, pads: Tensor) -> Tensor:
    """The random numbers of a call, float64 ``[B, columns, PURPOSES]``.

    They are counted by position, without padding, so that a prompt gets the same ones alone and in
    a padded batch.

    Args:
        streams: as :func:`row_streams` gives them.
        columns: that sequences and draft tokens may have.
        pads: int64 ``[B, 1]``, padding columns of each row.
    """
    seeds = torch.tensor(streams[0], dtype=torch.uint64).view(torch.int64).to(pads.device)
    rows = torch.tensor(streams[1], device=pads.device)
    positions = torch.arange(columns, device=pads.device) - pads
    return uniforms(seeds, rows, positions, PURPOSES)


def distribution(scores: Tensor) -> Tensor:
    """Probabilities, float64 ``[B, n, V]``; NaN in all of V where scores are no distribution.

    Args:
        scores: float32 ``[B, n, V]``.
    """
    # Not softmax: a GPU gives it one thread block a row, and there are few and long rows.
    weights = (scores.double() - scores.amax(-1, keepdim=True)).exp()
    return weights / _blocks(weights).sum(-1).sum(-1, keepdim=True)


def sample(weights: Tensor, uniform: Tensor) -> Tensor:
    """Token ids ``[B, 1]`` with probabilities that are proportional to weights.

    Args:
        weights: float64 ``[B, V]``, not negative. A weight of 0 is never chosen; where one is NaN,
            the token is of no meaning.
        uniform: float64 ``[B, 1]`` in [0, 1).
    """
    blocks = _blocks(weights)
    block, uniform = _pick(blocks.sum(-1), uniform)
    place, _ = _pick(blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0], uniform)
    return block * BLOCK + place


def _blocks(weights: Tensor) -> Tensor:
    """``[..., k, BLOCK]`` from ``[..., V]``, filled up with zeros.

    Sums of blocks have the same order on any number of rows, and a GPU's threads share them.
    """
    missing = -weights.shape[-1] % BLOCK
    padded = F.pad(weights, (0, missing)) if missing else weights
    return padded.unflatten(-1, (-1, BLOCK))


def _pick(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Indices ``[B, 1]`` of weights ``[B, n]``, and a uniform number that is left of each."""
    # Where a sum is divided among threads, rounding may let it grow at a weight of 0.
    cumulative = weights.cumsum(-1).masked_fill(weights <= 0, -1)
    # Less than the largest sum: a number of at most 1 - 2**-53 rounds no product up to it.
    threshold = uniform * cumulative.amax(-1, keepdim=True)
    # The first of equal maxima.
    index = (cumulative > threshold).to(torch.uint8).argmax(-1, keepdim=True)
    weight = weights.gather(1, index)
    left = (threshold - cumulative.gather(1, index)) / weight + 1
    return index, left.clamp(0, _LARGEST)


def is_accepted(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    """Whether a token is accepted, with probability min(1, p / q).

    Args:
        p: float64 ``[B, n]``, the token's probability in the target.
        q: float64 ``[B, n]``, its probability in the draft, which sampled it.
        uniform: float64 ``[B, n]`` in [0, 1).
    """
    # Always where p = q: the product is less than q. Never where one of them is NaN.
    return uniform * q < p


def recovery_weights(p: Tensor, q: Tensor) -> Tensor:
    """Weights of the token in place of a rejected one, ``[B, V]``: max(p - q, 0).

    Args:
        p: float64 ``[B, V]``, the target's distribution.
        q: float64 ``[B, V]``, the draft's; 0 everywhere if it drafted nothing.
    """
    excess = (p - q).clamp(min=0)
    # Rounding may leave none although a token was rejected; nor is there any where q is NaN.
    return torch.where(excess.sum(1, keepdim=True) > 0, excess, p)


class SampledSelection:
    """Tokens sampled from the target's distribution after transformers' logits processors.

    Draft and target go through the same processors. Probabilities are float64. Draft tokens that do
    not come from ``draft`` must not depend on random numbers of their own and later columns: their
    distribution is a point mass.

    Args:
        scores: applies the processors.
        table: float64 ``[B, columns, PURPOSES]``, random numbers for the token in each column.
    """

    def __init__(self, scores: ProcessedScores, table: Tensor) -> None:
        self.scores = scores
        self.key: Hashable = ("sampled", scores.key)
        self._table = table
        # Draft distributions of this round, [B, V] each.
        self._drafts: list[Tensor] = []

    def begin(self, other: "SampledSelection") -> None:
        """Start a call with what another selection of the same key was made for."""
        self.scores.begin(other.scores)
        self._table.copy_(other._table)
        self._drafts = []  # of a round that an error ended

    def draft(self, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
        """A token ``[B, 1]`` sampled from the draft's distribution, which is kept."""
        distribution = self._probabilities(logits, ids, column)[:, 0]
        self._drafts.append(distribution)
        return sample(distribution, self._numbers(column + 1)[..., DRAFT])

    def draft_probability(
        self, logits: Tensor, ids: Tensor, column: Tensor, token: Tensor
    ) -> Tensor:
        """The token's probability in the distribution that it was sampled from."""
        return self._drafts[-1].gather(1, token)

    def verify(
        self, logits: Tensor, ids: Tensor, last: Tensor, drafts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Judge the draft tokens; then a recovered token, or a bonus token if all are accepted."""
        target = self._probabilities(logits, ids, last)
        gamma = target.shape[1] - 1
        offsets = torch.arange(1, gamma + 2, device=last.device)
        columns = last + offsets
        numbers = self._numbers(columns)
        drafted = ids.gather(1, columns[:, :-1])
        draft = self._draft_distributions(target, drafted)
        if drafts is not None:
            draft = draft.masked_fill((offsets > drafts)[..., None], 0)

        p = target[:, :-1].gather(2, drafted[..., None])[..., 0]
        q = draft[:, :-1].gather(2, drafted[..., None])[..., 0]
        agreed = is_accepted(p, q, numbers[:, :-1, ACCEPT])
        if drafts is not None:
            agreed = agreed & (offsets[:-1] <= drafts)
        accepted = agreed.cumprod(1).bool()
        end = accepted.sum(1, keepdim=True)

        at_end = _at(target, end)
        weights = recovery_weights(at_end, _at(draft, end))
        is_bonus = end == (gamma if drafts is None else drafts)
        number = _at(numbers, end).gather(1, RECOVER + is_bonus.long())
        # A distribution is NaN everywhere or nowhere; no draft token is accepted where it is.
        chosen = torch.where(at_end[:, :1].isnan(), UNDEFINED, sample(weights, number))
        tokens = torch.cat((drafted, torch.zeros_like(last)), 1)
        return tokens.scatter(1, end, chosen), accepted

    def _draft_distributions(self, target: Tensor, drafted: Tensor) -> Tensor:
        """float64 ``[B, gamma + 1, V]`` of the round, which are then forgotten.

        Nothing is drafted behind the last draft token: a bonus token has an excess of all of p.
        """
        if not self._drafts:
            point_masses = torch.zeros_like(target)
            point_masses[:, :-1].scatter_(2, drafted[..., None], 1.0)
            return point_masses
        distributions = torch.stack([*self._drafts, torch.zeros_like(target[:, 0])], 1)
        self._drafts = []
        return distributions

    def _probabilities(self, logits: Tensor, ids: Tensor, last: Tensor) -> Tensor:
        """float64 ``[B, n, V]``."""
        return distribution(self.scores(logits, ids, last))

    def _numbers(self, columns: Tensor) -> Tensor:
        """Random numbers ``[B, n, PURPOSES]`` of columns ``[B, n]``."""
        return self._table.gather(1, columns[..., None].expand(-1, -1, PURPOSES))


def _at(values: Tensor, index: Tensor) -> Tensor:
    """``[B, k]`` from ``[B, n, k]``: each row at its own index ``[B, 1]``."""
    rows = torch.arange(len(values), device=values.device)
    return values[rows, index[:, 0]]
