"""Scores and acceptance of a contender, against what they are defined by."""

import math

import pytest
import small_models
import torch
import torch.nn.functional as F
from nested_models import nest_
from speculative_runs import PAD, nested_model, run
from transformers import PreTrainedModel

from nestq.compare import quality
from nestq.compare.quality import acceptance, score_in_engine, score_plainly, target_policy
from nestq.evaluation import nested_logits
from nestq.kv_policy import KVPolicy


@pytest.fixture(scope="module")
def dense() -> PreTrainedModel:
    return small_models.build("llama-gqa")


def expected_nats(logits: torch.Tensor, row: torch.Tensor) -> float:
    scores = logits[0, :-1].double()
    return F.cross_entropy(scores, row[1:], reduction="sum").item()


def test_a_score_is_that_of_the_logits(dense: PreTrainedModel) -> None:
    rows = small_models.tokens(dense, 3, 20)
    with torch.no_grad():
        nats = sum(expected_nats(dense(row[None]).logits, row) for row in rows)

    plain = score_plainly(dense, rows)
    engine = score_in_engine(dense, rows, KVPolicy.parse("16/16"))

    assert plain.predictions == engine.predictions == 3 * 19
    # Sums of 57 float32 numbers of one sign: 57 roundings at most.
    assert plain.nats == pytest.approx(nats, rel=57 * 2**-24)
    # Attention of the engine sums in another order: a few roundings of each logit.
    assert engine.nats == pytest.approx(nats, rel=1e-5)
    assert plain.perplexity == math.exp(plain.nats / 57)


def test_a_target_is_scored_block_by_block_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row invariance: the logits are the same bits, so the sums differ by their rounding."""
    model = nest_(small_models.build("llama-gqa"))
    rows = small_models.tokens(model, 2, 21)
    with torch.no_grad():
        nats = sum(expected_nats(nested_logits(model, "target")(row[None]), row) for row in rows)
    for block in (1, 5, 7, 64):
        monkeypatch.setattr(quality, "SCORED_AT_ONCE", block)
        score = score_in_engine(model, rows, KVPolicy.parse("kv4/kv8"))
        assert score.nats == pytest.approx(nats, rel=40 * 2**-24)
        assert score.predictions == 40


@pytest.mark.parametrize(
    ("policy", "target"),
    [
        ("kv8/kv8", "kv8/kv8"),
        ("kv4/kv8", "kv8/kv8"),
        ("recent(3)", "kv8/kv8"),
        ("auto(9)+streaming(4,9)", "kv8/kv8"),
        ("kv4/kv4", "kv4/kv4"),
        ("16/16+snapkv(40)", "16/16"),
        ("quantspec", "quantspec"),
    ],
)
def test_policies_with_one_target_share_a_score(policy: str, target: str) -> None:
    assert str(target_policy(KVPolicy.parse(policy))) == target


def test_acceptance_is_that_of_decoding() -> None:
    model = nested_model()
    rows = torch.tensor([[5, 6, 7, 8], [11, 12, 13, 14]])
    policy = KVPolicy.parse("kv4/kv8")

    known = acceptance(model, rows, policy, gamma=3, new_tokens=12, batch_size=1, pad_token_id=PAD)

    outputs = [run(model, row[None], 3, kv="kv4/kv8", max_new_tokens=12) for row in rows]
    metrics = [output.metrics for output in outputs]
    accepted = sum(one.accepted for one in metrics)
    rounds = sum(one.rounds for one in metrics)
    assert known["acceptance"] == "measured"
    assert known["slot_acceptance"] == accepted / (3 * rounds)
    assert known["tokens_per_round"] == 1 + accepted / rounds
    assert len(known["acceptance_per_position"]) == 3
    assert known["new_tokens"] == sum(one.tokens for one in metrics)
    assert known["measured_peak_bytes"] is None
