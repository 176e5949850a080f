"""Chooses how many tokens to draft: the number that gives the most tokens a second.

What a choice depends on is known before the round begins: which draft tokens earlier rounds
accepted, and how long rounds took. Never does it depend on what the round itself drafts, nor on
random numbers that the round will use, so that sampling keeps the target's distribution. (Rows of
one call that are given the same seed and different prompts are not independent of each other, and
neither are their samples of the choice.)
"""

import warnings
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from statistics import median
from typing import TypeVar

from nestq.speculative.round_kinds import RoundKind

Choice = TypeVar("Choice", bound=Hashable)

# What is measured first.
FIRST_GAMMA = 4
# Drafts must promise so many times the speed that decoding has without them.
MARGIN = 1.05
# Tokens of a row without drafts, after which drafts are tried again.
RETRY_TOKENS = 32
# What counts of the past, after one more round.
MEMORY = 0.95
# Rounds whose median time counts.
TIMES = 5
# Guess until it is known: time of a draft step in verifications, by the bytes that they read.
DRAFT_STEP = 0.5


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Mean tokens of a round with 0, 1, ... n draft tokens.

    Args:
        acceptance: of n depths: probability of accepting a draft token if all before it are.
    """
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


def fastest(tokens: Mapping[Choice, float], seconds: Mapping[Choice, float]) -> Choice:
    """The choice with the most tokens a second; the first of equals.

    Args:
        tokens: mean tokens of a round, by choice.
        seconds: time of a round, by choice: of gamma draft steps and a verification.
    """
    return max(tokens, key=lambda choice: tokens[choice] / seconds[choice])


class AcceptanceEstimate:
    """Acceptance by depth: an exponentially weighted mean over rounds.

    A depth of which little is known is taken to be like the one before it.

    Args:
        depths: draft tokens that there may be.
        prior: of the first depth.
        weight: of the prior, in rounds; it fades like other rounds.
    """

    def __init__(self, depths: int, prior: float, weight: float) -> None:
        self._accepted = [prior * weight] + [0.0] * (depths - 1)
        self._judged = [weight] + [0.0] * (depths - 1)

    def add(self, rows: Sequence[tuple[int, int]]) -> None:
        """Add a round: for each row, draft tokens accepted, and draft tokens judged.

        Those behind the first rejected one are not judged.
        """
        if not rows:
            return
        for depth in range(len(self._judged)):
            accepted = sum(kept > depth for kept, _ in rows) / len(rows)
            judged = sum(count > depth for _, count in rows) / len(rows)
            self._accepted[depth] = MEMORY * self._accepted[depth] + accepted
            self._judged[depth] = MEMORY * self._judged[depth] + judged

    def forget(self) -> None:
        """Let what is known count no more than the next round."""
        for depth, judged in enumerate(self._judged):
            share = min(1.0, 1 / judged) if judged else 1.0
            self._accepted[depth] *= share
            self._judged[depth] *= share

    def __call__(self) -> list[float]:
        """Probability, at each depth, of accepting a draft token if all before it are."""
        first = self._accepted[0] / self._judged[0]
        estimates = [first]
        for accepted, judged in zip(self._accepted[1:], self._judged[1:], strict=True):
            estimates.append((estimates[-1] + accepted) / (1 + judged))
        return estimates


class RoundTimes:
    """How long rounds of each kind take: the median of the last few.

    The first of a kind does not count: it may compile. A kind that has not been measured is taken
    to have the verification and the draft steps of the nearest kind that has.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[RoundKind, deque[float]] = defaultdict(
            lambda: deque(maxlen=TIMES)
        )
        self._begun: set[RoundKind] = set()

    def add(self, kind: RoundKind, seconds: float) -> None:
        """Add what a round took."""
        if kind in self._begun:
            self._seconds[kind].append(seconds)
        self._begun.add(kind)

    def is_known(self, kind: RoundKind) -> bool:
        """Whether a round of the kind was measured."""
        return kind in self._seconds

    def __call__(self, kind: RoundKind) -> float:
        """Seconds; in verifications if nothing is known."""
        if kind in self._seconds:
            return median(self._seconds[kind])
        known = [other for other in self._seconds if not other.lookup]
        if not known:
            return 1 + DRAFT_STEP * _draft_steps(kind)
        nearest = min(known, key=lambda other: abs(other.tokens - kind.tokens))
        step = self._draft_step(nearest)
        verification = median(self._seconds[nearest]) / (1 + step * nearest.tokens)
        return verification * (1 + step * _draft_steps(kind))

    def _draft_step(self, kind: RoundKind) -> float:
        """Time of a draft step of a measured kind, in verifications."""
        plain = RoundKind(0)
        if kind == plain or plain not in self._seconds:
            return DRAFT_STEP
        ratio = median(self._seconds[kind]) / median(self._seconds[plain])
        return max(ratio - 1, 0.0) / kind.tokens


def _draft_steps(kind: RoundKind) -> int:
    return 0 if kind.lookup else kind.tokens


class Chooser:
    """Chooses the kind of each round, and learns from those before it.

    Args:
        kinds: what there is to choose from. With a kind of no draft tokens, drafts that do not pay
            are left out, and tried again every ``RETRY_TOKENS`` tokens.
        times: of rounds, kept by the caller for as long as they are of use.
    """

    def __init__(self, kinds: Sequence[RoundKind], times: RoundTimes) -> None:
        self._drafting = [kind for kind in kinds if kind.tokens and not kind.lookup]
        self._plain = next((kind for kind in kinds if not kind.tokens), None)
        self._lookup = next((kind for kind in kinds if kind.lookup), None)
        self._times = times
        depths = max(1, *(kind.tokens for kind in kinds))
        self._accepted = AcceptanceEstimate(depths, prior=0.8, weight=8)
        self._accepted_lookup = AcceptanceEstimate(depths, prior=0.2, weight=2)
        # Tokens of a row until drafts are tried again.
        self._rest = 0.0
        # Whether they are being tried, and what came of it is not known.
        self._trying = False
        self._has_said = False

    def choose(self, matches: float = 0.0) -> RoundKind:
        """The kind of the next round.

        Args:
            matches: share of rows whose last tokens occurred before.
        """
        first = min(self._drafting, key=lambda k: abs(k.tokens - FIRST_GAMMA), default=None)
        for kind in (first, self._plain):
            if kind is not None and not self._times.is_known(kind):
                return kind
        chosen = self._choose_drafts()
        if self._lookup is None or not matches:
            return chosen
        expected = expected_tokens(self._accepted_lookup())[self._lookup.tokens]
        speed = (1 + matches * (expected - 1)) / self._times(self._lookup)
        return self._lookup if speed > self._speed(chosen) else chosen

    def observe(
        self, kind: RoundKind, seconds: float, rows: Sequence[tuple[int, int]], tokens: float
    ) -> None:
        """Learn from a round that has ended.

        Args:
            kind: of the round.
            seconds: that it took.
            rows: draft tokens accepted and judged in each row that was not finished.
            tokens: that these rows got, on average.
        """
        self._times.add(kind, seconds)
        if kind in self._drafting:
            self._accepted.add(rows)
            self._trying = False
        elif self._rest > 0:
            self._rest -= tokens
            if self._rest <= 0:
                self._accepted.forget()
                self._trying = True

    def observe_lookup(self, rows: Sequence[tuple[int, int]]) -> None:
        """Learn what looking up would have given, in rows with a match."""
        self._accepted_lookup.add(rows)

    def _choose_drafts(self) -> RoundKind:
        if self._plain is not None and (self._rest > 0 or not self._drafting):
            return self._plain
        expected = expected_tokens(self._accepted())
        best = fastest(
            {kind: expected[kind.tokens] for kind in self._drafting},
            {kind: self._times(kind) for kind in self._drafting},
        )
        if self._plain is None or self._trying:
            return best
        if self._speed(best) > MARGIN * self._speed(self._plain):
            return best
        self._rest = RETRY_TOKENS
        self._say_so(best)
        return self._plain

    def _speed(self, kind: RoundKind) -> float:
        """Tokens of a row a second."""
        return expected_tokens(self._accepted())[kind.tokens] / self._times(kind)

    def _say_so(self, best: RoundKind) -> None:
        if self._has_said:
            return
        self._has_said = True
        gain = self._speed(best) / self._speed(RoundKind(0))
        warnings.warn(
            "gamma='auto': drafts do not pay here, so that decoding goes on without them and tries "
            f"them again every {RETRY_TOKENS} tokens. The first draft token of a round is accepted "
            f"with probability {self._accepted()[0]:.2f}, and with the best gamma "
            f"({best.tokens}) decoding would have {gain:.2f} times the speed",
            stacklevel=2,
        )
