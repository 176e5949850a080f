"""Quality of a nested model beside its original: counts, and what they are computed from."""

import json
import math

import pytest
import small_models
import torch
import torch.nn.functional as F
from nested_models import nest_
from rich.console import Console
from small_models import build
from speculative_runs import PAD, nested_model, run
from transformers import PreTrainedModel

from nestq.evaluation import (
    ModelScore,
    dense_logits,
    generation_table,
    measure_acceptance,
    nested_logits,
    plain_w8a8,
    score_text,
)
from nestq.tensor import NestedQuantTensor

SEQUENCES = [[5, 9, 31, 7, 7, 60, 2], [90, 1, 44, 8], [3, 3]]
PREDICTIONS = 6 + 3 + 1


@pytest.fixture(scope="module")
def dense() -> PreTrainedModel:
    return build("llama-gqa")


@pytest.fixture(scope="module")
def nested() -> PreTrainedModel:
    """The same weights, nested."""
    return nest_(build("llama-gqa"))


def test_a_score_counts_predictions_of_the_next_token() -> None:
    logits = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [9.0, 9.0, 9.5]]])
    tokens = torch.tensor([[1, 0, 2]])
    score = ModelScore("any")

    own = score.add(logits, tokens, choices=torch.tensor([0, 2]))

    assert own.tolist() == [0, 1]
    assert (score.predictions, score.agreements, score.agreement) == (2, 1, 0.5)
    # -log softmax at token 0 after the first position, and at token 2 after the second.
    expected = math.log(math.exp(2) + 1 + math.e) - 2 + math.log(math.exp(3) + 2)
    assert score.nats == pytest.approx(expected, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(expected / 2), rel=1e-5)


def test_perplexity_and_agreement_are_those_of_the_logits(
    dense: PreTrainedModel, nested: PreTrainedModel
) -> None:
    evaluation = score_text(dense, nested, SEQUENCES, progress=False)

    models = [dense_logits(dense), nested_logits(nested, "target"), nested_logits(nested, "draft")]
    choices = []
    for score, logits in zip(evaluation.scores, models, strict=True):
        nats, chosen = 0.0, []
        for sequence in SEQUENCES:
            tokens = torch.tensor([sequence])
            with torch.no_grad():
                out = logits(tokens)[0, :-1]
            nats += F.cross_entropy(out, tokens[0, 1:], reduction="sum").item()
            chosen += out.argmax(-1).tolist()
        choices.append(chosen)
        assert score.predictions == PREDICTIONS
        assert score.nats == pytest.approx(nats, rel=1e-6)
        assert score.agreements == sum(map(int.__eq__, chosen, choices[0]))
    same = sum(map(int.__eq__, choices[1], choices[2]))
    assert evaluation.draft_target_agreement == same / PREDICTIONS
    assert evaluation.scores[0].agreement == 1
    assert [s.name for s in evaluation.scores] == [
        "16-bit",
        "target (W8A8, KV8)",
        "draft (W4A8, KV8)",
    ]


def test_nested_logits_are_near_the_dense_ones_and_the_target_is_nearer(
    dense: PreTrainedModel, nested: PreTrainedModel
) -> None:
    tokens = small_models.tokens(dense, 1, 24)
    with torch.no_grad():
        exact = dense_logits(dense)(tokens)
        target, draft = (nested_logits(nested, view)(tokens) for view in ("target", "draft"))

    assert (target - exact).norm() < 0.1 * exact.norm()
    assert (target - exact).norm() < 0.5 * (draft - exact).norm()


def test_plain_w8a8_is_a_copy(dense: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    tokens = small_models.tokens(dense, 1, 24)

    w8a8 = plain_w8a8(dense, "orthogonal", seed=1)

    after = dense.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with torch.no_grad():
        exact, rounded = dense(tokens).logits, w8a8(tokens).logits
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < 0.1
    assert not any(isinstance(p, NestedQuantTensor) for p in w8a8.parameters())
    names = [
        score.name
        for score in score_text(
            dense, nest_(build("llama-gqa")), SEQUENCES, w8a8, progress=False
        ).scores
    ]
    assert names[1] == "plain W8A8"


def test_acceptance_is_summed_over_batches() -> None:
    model = nested_model()
    prompts = [[5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24], [31, 32, 33]]

    summed = measure_acceptance(
        model,
        prompts,
        max_new_tokens=12,
        pad_token_id=PAD,
        gamma=3,
        kv="kv4/kv8",
        batch_size=3,
        progress=False,
    )

    alone = []
    for prompt in prompts:
        output = run(model, torch.tensor([prompt]), 3, kv="kv4/kv8", max_new_tokens=12)
        assert output.metrics is not None
        alone.append(output.metrics)
    assert (summed.gamma, summed.batch, summed.tokens) == (3, 4, 48)
    assert summed.rounds == sum(metrics.rounds for metrics in alone)
    per_position = zip(*(metrics.accepted_per_position for metrics in alone), strict=True)
    assert summed.accepted_per_position == list(map(sum, per_position))
    # Two batches: one of three rows, one of one row.
    assert summed.verifications < summed.rounds
    assert summed.total_seconds >= summed.draft_seconds + summed.verification_seconds


def test_tables_and_numbers(dense: PreTrainedModel, nested: PreTrainedModel) -> None:
    evaluation = score_text(dense, nested, SEQUENCES, progress=False)
    assert evaluation.to_dict()["generation"] is None
    evaluation.generation = measure_acceptance(
        nested_model(), [[5, 6, 7]], max_new_tokens=8, pad_token_id=PAD, progress=False
    )

    console = Console(width=80)
    with console.capture() as capture:
        console.print(evaluation.quality_table())
        console.print(generation_table(evaluation.generation))
    text = capture.get()
    numbers = json.loads(json.dumps(evaluation.to_dict()))
    assert f"{PREDICTIONS} held-out positions" in text
    first, target, _ = numbers["models"]
    change = target["perplexity"] / first["perplexity"] - 1
    assert f"{change:+.2%}" in text
    assert f"{numbers['draft_target_agreement']:.4f}" in text
    assert f"{numbers['generation']['slot_acceptance']:.4f}" in text
    assert "…" not in text
