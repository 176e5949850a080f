"""Synthetic acceptance: the probability a token, and what is drawn."""

import math

import pytest
import torch
from transformers import LogitsProcessorList

from nestq.bench.acceptance import Acceptance, SyntheticSelection, per_token_probability
from nestq.speculative.scores import ProcessedScores


@pytest.mark.parametrize("gamma", [1, 2, 4, 16])
@pytest.mark.parametrize("slot", [0.0, 0.3, 0.875, 0.952, 1.0])
def test_the_probability_a_token_gives_the_slot_acceptance(slot: float, gamma: int) -> None:
    a = per_token_probability(slot, gamma)
    assert 0 <= a <= 1
    assert sum(a**i for i in range(1, gamma + 1)) == pytest.approx(gamma * slot, abs=1e-12)


def test_known_values() -> None:
    acceptance = Acceptance.synthetic(0.952, 4)
    assert acceptance.per_token == pytest.approx(0.9804, abs=5e-5)
    assert acceptance.tokens_per_round == pytest.approx(4.808)
    assert str(acceptance) == "synthetic 0.952 (0.9804 a token)"
    assert str(Acceptance("measured", 4, 0.87654)) == "measured 0.8765"
    at = Acceptance("measured", 4, 0.87654, context=190)
    assert str(at) == "measured 0.8765 at 190 tokens"
    with pytest.raises(ValueError, match=r"must be from 0 to 1, got 1\.5"):
        Acceptance.synthetic(1.5, 4)


def test_what_is_drawn_has_the_rate() -> None:
    batch, gamma, vocabulary, slot = 4096, 4, 7, 0.8
    torch.manual_seed(0)
    probability = per_token_probability(slot, gamma)
    scores = ProcessedScores(LogitsProcessorList(), torch.device("cpu"))
    selection = SyntheticSelection(scores, probability)
    logits = torch.randn(batch, gamma + 1, vocabulary)
    ids = torch.randint(vocabulary, (batch, 20))
    last = torch.randint(10, (batch, 1))

    tokens, accepted = selection.verify(logits, ids, last)

    drafted = ids.gather(1, last + torch.arange(1, gamma + 1))
    assert torch.equal(accepted, accepted.cumprod(1).bool())
    assert (tokens[:, :-1] == drafted)[accepted].all()
    kept = torch.cat((accepted, torch.zeros(batch, 1, dtype=torch.bool)), 1)
    assert torch.equal(tokens[~kept], logits.argmax(-1)[~kept])
    assert torch.equal(selection.draft(logits[:, :1], ids, last), logits[:, :1].argmax(-1))
    # Hoeffding: a mean of n numbers in [0, 1] is further off with probability 2 exp(-2 n t^2).
    bound = math.sqrt(math.log(2 / 1e-6) / (2 * batch))
    assert abs(accepted.float().mean().item() - slot) <= bound
    for position in range(gamma):
        share = accepted[:, position].float().mean().item()
        assert abs(share - probability ** (position + 1)) <= bound
