"""Sampled tokens have the target's distribution, and every fault that could be is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_runs import (
    LEAST_P,
    SETTINGS,
    chi_square_p,
    distance,
    exact,
    fit_p,
    same_p,
    samples,
    target_samples,
    tiny_model,
)
from torch import Tensor

from nestq.speculative import sampling
from nestq.speculative.sampling import SampledSelection

COUNT = 1200


def seed_of(setting: str, gamma: int, batch: int) -> int:
    return 1000 * list(SETTINGS).index(setting) + 10 * gamma + batch


def test_draft_and_target_differ() -> None:
    assert distance(tiny_model()) > 0.25


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "plain"])
def test_settings_change_the_distribution(setting: str) -> None:
    assert (exact(setting, 0) - exact("plain", 0)).abs().sum() / 2 > 0.1


def test_chi_square() -> None:
    # Tables: the 5% points for 1, 10 and 100 degrees of freedom.
    for freedom, point in ((1, 3.841459), (10, 18.307038), (100, 124.342113)):
        assert chi_square_p(point, freedom) == pytest.approx(0.05, abs=1e-7)


def assert_exact(setting: str, gamma: int, batch: int, count: int = COUNT) -> None:
    new = samples(setting, gamma, batch, count // batch, seed_of(setting, gamma, batch))
    assert fit_p(new, setting) > LEAST_P
    assert same_p(new, target_samples(setting, batch, count // batch)) > LEAST_P


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("batch", [1, 4])
def test_the_target_alone(setting: str, batch: int) -> None:
    assert fit_p(target_samples(setting, batch, COUNT // batch), setting) > LEAST_P


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("batch", [1, 4])
def test_speculative_samples(setting: str, gamma: int, batch: int) -> None:
    assert_exact(setting, gamma, batch)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("gamma", range(1, 7))
@pytest.mark.parametrize("batch", [1, 4])
def test_many_speculative_samples(setting: str, gamma: int, batch: int) -> None:
    assert_exact(setting, gamma, batch, count=8000)


def accept_always(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    return torch.ones_like(p, dtype=torch.bool)


def accept_if_likelier(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    return p > q


def recover_from_target(p: Tensor, q: Tensor) -> Tensor:
    return p


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("gamma", [1, 4])
def test_accepting_every_draft_token_is_noticed(
    setting: str, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "is_accepted", accept_always)
    assert fit_p(samples(setting, gamma, 1, COUNT, 1), setting) < LEAST_P


_draft = SampledSelection.draft


def most_likely_draft(self: Any, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
    _draft(self, logits, ids, column)
    return self._drafts[-1].argmax(-1, keepdim=True)


def unprocessed_draft(self: Any, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
    token = _draft(self, logits, ids, column)
    self._drafts[-1] = logits[:, 0].softmax(-1, dtype=torch.float64)
    return token


def one_context_for_all(self: Any, logits: Tensor, ids: Tensor, last: Tensor) -> Any:
    scores = [self.scores(part, ids, last) for part in logits.split(1, 1)]
    return torch.cat(scores, 1).softmax(-1, dtype=torch.float64)


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "tokens that are likelier are accepted": (
        sampling, "is_accepted", accept_if_likelier, "plain",
    ),
    "recovered from the target's distribution": (
        sampling, "recovery_weights", recover_from_target, "plain",
    ),
    "recovered with the number of acceptance": (sampling, "RECOVER", sampling.ACCEPT, "plain"),
    "accepted with the number of the draft": (sampling, "ACCEPT", sampling.DRAFT, "plain"),
    "drafted greedily": (SampledSelection, "draft", most_likely_draft, "plain"),
    "a ratio without the draft's processors": (
        SampledSelection, "draft", unprocessed_draft, "low temperature",
    ),
    "the first context for all positions": (
        SampledSelection, "_probabilities", one_context_for_all, "presence",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_other_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong, setting = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong)
    assert fit_p(samples(setting, 4, 1, 3 * COUNT, 2), setting) < LEAST_P


def reversed_logits(logits: Tensor) -> Tensor:
    return logits.flip(-1)


def flat_logits(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits)


def one_token_logits(logits: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor(1), 0.0)


def no_logits(logits: Tensor) -> Tensor:
    return torch.full_like(logits, torch.nan)


@pytest.mark.parametrize("other", [reversed_logits, flat_logits, one_token_logits, no_logits])
@pytest.mark.parametrize("setting", ["plain", "several"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_any_draft_gives_the_same_distribution(
    other: Callable[[Tensor], Tensor], setting: str, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft(self: Any, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
        return _draft(self, other(logits), ids, column)

    monkeypatch.setattr(SampledSelection, "draft", draft)
    new = samples(setting, gamma, 1, COUNT, 3)
    assert fit_p(new, setting) > LEAST_P
    assert same_p(new, target_samples(setting, 1, COUNT)) > LEAST_P
