"""Choosing the number of draft tokens, by numbers alone."""

import itertools
import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestq.speculative import adaptive
from nestq.speculative.adaptive import (
    RETRY_TOKENS,
    AcceptanceEstimate,
    Chooser,
    RoundTimes,
    expected_tokens,
    fastest,
)
from nestq.speculative.round_kinds import AUTO_GAMMAS, RoundKind, kinds_of

AUTO = kinds_of("auto", 0)
PLAIN, FIRST = RoundKind(0), RoundKind(4)
shares = st.floats(0, 1)


def mean_tokens(acceptance: list[float]) -> float:
    """By going through all outcomes of all draft tokens."""
    total = 0.0
    for outcome in itertools.product((True, False), repeat=len(acceptance)):
        pairs = zip(acceptance, outcome, strict=True)
        probability = math.prod(a if accepted else 1 - a for a, accepted in pairs)
        total += probability * (1 + len(list(itertools.takewhile(bool, outcome))))
    return total


@given(st.lists(shares, max_size=7))
def test_expected_tokens(acceptance: list[float]) -> None:
    tokens = expected_tokens(acceptance)
    assert len(tokens) == len(acceptance) + 1
    for gamma, value in enumerate(tokens):
        assert math.isclose(value, mean_tokens(acceptance[:gamma]), rel_tol=1e-9)


@given(
    acceptance=st.lists(shares, min_size=8, max_size=8),
    draft=st.floats(1e-3, 10),
    verify=st.lists(st.floats(1e-3, 10), min_size=9, max_size=9),
)
def test_the_fastest_is_found(acceptance: list[float], draft: float, verify: list[float]) -> None:
    tokens = expected_tokens(acceptance)
    seconds = {gamma: gamma * draft + verify[gamma] for gamma in AUTO_GAMMAS}
    best = fastest({gamma: tokens[gamma] for gamma in AUTO_GAMMAS}, seconds)
    speeds = [
        mean_tokens(acceptance[:gamma]) / (gamma * draft + verify[gamma]) for gamma in AUTO_GAMMAS
    ]
    assert math.isclose(tokens[best] / seconds[best], max(speeds), rel_tol=1e-9)


def test_an_optimum_by_hand() -> None:
    # 1.8 / 1.5, 2.44 / 2, 3.36 / 3: two draft tokens are best.
    tokens = expected_tokens([0.8] * 4)
    assert fastest(dict(enumerate(tokens)), {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0}) == 2
    assert fastest({1: 2.0, 0: 1.0}, {1: 2.0, 0: 1.0}) == 1  # the first of equals


@given(rounds=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30))
def test_acceptance_by_depth(rounds: list[tuple[int, bool]]) -> None:
    estimate = AcceptanceEstimate(6, prior=0.8, weight=8)
    weights = [adaptive.MEMORY ** (len(rounds) - 1 - i) for i in range(len(rounds))]
    expected, before = [], 0.0
    for depth in range(6):
        judged = accepted = 0.0
        for weight, (kept, rejected) in zip(weights, rounds, strict=True):
            accepted += weight * (kept > depth)
            judged += weight * (kept + rejected > depth)
        fades = adaptive.MEMORY ** len(rounds)
        prior, weight = (0.8, 8 * fades) if depth == 0 else (before, 1.0)
        before = (prior * weight + accepted) / (weight + judged)
        expected.append(before)
    for kept, rejected in rounds:
        estimate.add([(kept, kept + rejected)])
    assert estimate() == pytest.approx(expected)
    assert all(0 <= value <= 1 for value in estimate())


def test_rows_of_a_round_count_together() -> None:
    one, four = (AcceptanceEstimate(2, prior=0.8, weight=8) for _ in range(2))
    for _ in range(50):
        one.add([(1, 2)])
        four.add([(1, 2), (0, 1), (2, 2), (1, 2)])
        four.add([])  # all rows finished
    # The prior has a twentieth of what the 50 rounds have.
    assert one()[0] == pytest.approx(1, abs=0.01)
    assert one()[1] == pytest.approx(0, abs=0.1)
    assert four() == pytest.approx([3 / 4, 1 / 3], abs=0.05)
    four.forget()
    four.add([(0, 1)])
    assert four()[0] == pytest.approx(0.375, abs=0.03)


def test_times_are_medians_without_the_first() -> None:
    times = RoundTimes()
    times.add(FIRST, 99.0)
    assert not times.is_known(FIRST)
    for seconds in (50.0, 3.0, 3.5, 2.5, 3.0, 77.0):  # the oldest of six is forgotten
        times.add(FIRST, seconds)
    assert times(FIRST) == 3.0


def test_times_that_are_not_known_are_guessed() -> None:
    times = RoundTimes()
    assert times(RoundKind(8)) / times(PLAIN) == 5
    for seconds in (9.0, 6.0):
        times.add(FIRST, seconds)
    assert times(PLAIN) == times(RoundKind(16, lookup=True)) == 2.0
    for seconds in (9.0, 4.0):
        times.add(PLAIN, seconds)
    # Now a draft step is known to take 0.5, and a verification 4.
    assert times(RoundKind(8)) == pytest.approx(8.0)
    assert times(RoundKind(1)) == pytest.approx(6.0)  # from the plain round, by the usual ratio
    assert times(RoundKind(16, lookup=True)) == pytest.approx(4.0)


def simulate(
    acceptance: list[float], draft: float, rounds: int, kinds: tuple[RoundKind, ...] = AUTO
) -> list[RoundKind]:
    """Kinds that are chosen where rounds accept as expected on average, one row at a time."""
    chooser, chosen = Chooser(kinds, RoundTimes()), []
    for number in range(rounds):
        kind = chooser.choose()
        kept = 0
        # Low-discrepancy numbers in place of random ones.
        while kept < kind.tokens and (number * 0.618 + kept * 0.377) % 1 < acceptance[kept]:
            kept += 1
        judged = min(kept + 1, kind.tokens)
        chooser.observe(kind, 1 + draft * kind.tokens, [(kept, judged)], kept + 1)
        chosen.append(kind)
    return chosen


@pytest.mark.parametrize("draft", [0.05, 0.3, 0.5])
@pytest.mark.parametrize("acceptance", [0.75, 0.9, 0.98])
def test_the_choice_settles_near_the_optimum(acceptance: float, draft: float) -> None:
    tokens = expected_tokens([acceptance] * 8)
    speeds = {gamma: tokens[gamma] / (1 + draft * gamma) for gamma in AUTO_GAMMAS}
    if max(speeds.values()) < 1.1:
        return
    late = simulate([acceptance] * 8, draft, 400)[200:]
    mean = sum(tokens[k.tokens] for k in late) / sum(1 + draft * k.tokens for k in late)
    assert mean > 0.95 * max(speeds.values())


def test_it_measures_first() -> None:
    assert simulate([0.9] * 8, 0.5, 4) == [FIRST, FIRST, PLAIN, PLAIN]
    kinds = kinds_of(3, 5)
    assert simulate([0.9] * 8, 0.5, 3, kinds) == [RoundKind(3)] * 3


def test_drafts_that_do_not_pay_are_left_out_and_tried_again() -> None:
    with pytest.warns(UserWarning, match="drafts do not pay here") as caught:
        kinds = simulate([0.1] * 8, 0.5, 400)
    assert len(caught) == 1
    plain = [len(list(group)) for k, group in itertools.groupby(kinds) if k == PLAIN]
    # What is measured first; and then one token a round. A lucky try lasts longer.
    assert plain[0] == 2
    assert set(plain[1:-1]) == {RETRY_TOKENS}
    assert sum(kind != PLAIN for kind in kinds) < 0.1 * len(kinds)


def test_drafts_that_pay_again_are_taken_up() -> None:
    chooser = Chooser(AUTO, RoundTimes())

    def rounds(count: int, accepts: bool) -> list[RoundKind]:
        chosen = []
        for _ in range(count):
            kind = chooser.choose()
            kept = kind.tokens if accepts else 0
            judged = min(kept + 1, kind.tokens)
            chooser.observe(kind, 1 + 0.5 * kind.tokens, [(kept, judged)], kept + 1)
            chosen.append(kind)
        return chosen

    with pytest.warns(UserWarning, match="tries them again every 32 tokens"):
        assert rounds(60, accepts=False)[-1] == PLAIN
    assert PLAIN not in rounds(150, accepts=True)[-50:]


def test_results_that_come_a_round_late() -> None:
    """A try is not judged before its result is there."""
    chooser, late, chosen = Chooser(AUTO, RoundTimes()), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(300):
            late.append(chooser.choose())
            if len(late) > 1:
                kind = late.pop(0)
                chooser.observe(kind, 1 + 0.5 * kind.tokens, [(0, min(1, kind.tokens))], 1)
                chosen.append(kind)
    drafted = [kind != PLAIN for kind in chosen]
    tries = [len(list(group)) for drafts, group in itertools.groupby(drafted) if drafts]
    assert set(tries[2:]) == {2}
    assert len(tries) > 6


def test_looking_up_is_chosen_where_it_pays() -> None:
    lookup = RoundKind(6, lookup=True)
    chooser = Chooser(kinds_of("auto", 6), RoundTimes())
    for kind, seconds in ((FIRST, 3.0), (FIRST, 3.0), (PLAIN, 1.0), (PLAIN, 1.0)):
        chooser.observe(kind, seconds, [(kind.tokens, kind.tokens)], kind.tokens + 1)
    assert chooser.choose(matches=1.0) != lookup
    for _ in range(20):
        chooser.observe_lookup([(6, 6)])
    assert chooser.choose(matches=1.0) == lookup
    assert chooser.choose(matches=0.0) != lookup
    assert chooser.choose(matches=0.05) != lookup  # one row of twenty
    for _ in range(40):
        chooser.observe_lookup([(0, 1)])
    assert chooser.choose(matches=1.0) != lookup
