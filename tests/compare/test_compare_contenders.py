"""The registry, and what ablations make of it."""

from dataclasses import replace

import pytest
import small_models
import torch
from nested_models import nest_
from transformers import PreTrainedModel

from nestq.compare.ablations import ablation, over_target_alone
from nestq.compare.contenders import (
    BASELINE,
    CONTENDERS,
    WEIGHTS,
    Calibration,
    by_weights,
    chosen,
)
from nestq.compare.results import BytesRead, Result, Results
from nestq.compare.runner import Plan, Subject, run
from nestq.four_bit_tensor import FourBitTensor
from nestq.tensor import NestedQuantTensor


def test_every_contender_has_weights_and_a_policy() -> None:
    for name, contender in CONTENDERS.items():
        assert contender.name == name
        assert contender.weights in WEIGHTS
        contender.policy(1024)


def test_sparse_drafts_read_a_quarter_of_the_context() -> None:
    texts = {name: str(one.policy(2048)) for name, one in CONTENDERS.items()}
    assert texts["streaming-llm"] == "16/16+streaming(4,508)"
    assert texts["bitnest-snapkv"] == "kv8/kv8+snapkv(512)"
    with pytest.raises(ValueError, match=r"--contexts 128: too short for snapkv, .* budget"):
        CONTENDERS["snapkv"].policy(128)


def test_the_baseline_is_always_chosen_and_order_is_that_of_the_registry() -> None:
    assert [one.name for one in chosen(["qspec", "w8a8"])] == ["16-bit", "w8a8", "qspec"]
    assert chosen(None) == list(CONTENDERS.values())
    with pytest.raises(ValueError, match="got 'bitnet'"):
        chosen(["bitnet"])


def test_contenders_with_the_same_weights_follow_each_other() -> None:
    groups = by_weights(list(CONTENDERS.values()))
    assert sum(map(len, groups.values())) == len(CONTENDERS)
    assert {one.name for one in groups["quantspec"]} == {"quantspec", "quantspec-weights"}
    for name, group in groups.items():
        assert {one.weights for one in group} == {name}
        skips = [one.skips for one in group]
        assert skips == sorted(skips)


@pytest.mark.parametrize("name", [name for name, weights in WEIGHTS.items() if weights.recipe])
def test_weights_are_made_of_a_copy(name: str) -> None:
    model = small_models.build("llama-gqa", dtype=torch.bfloat16)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    made = WEIGHTS[name].made_of(model, Calibration(None, progress=False))

    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    kinds = {type(weight) for weight in made.parameters()}
    assert (NestedQuantTensor in kinds) == (name == "bitnest")
    assert (FourBitTensor in kinds) == (name in ("w4a8", "w4a16", "quantspec", "qspec"))


def nested_subject(prompts: torch.Tensor) -> tuple[Subject, list[str]]:
    """A subject that notes which weights were asked for."""
    asked: list[str] = []
    model = small_models.build("llama-gqa", dtype=torch.bfloat16)
    nested = nest_(small_models.build("llama-gqa", dtype=torch.bfloat16))

    class Noting(Subject):
        def with_weights(self, name: str) -> PreTrainedModel:
            asked.append(name)
            return super().with_weights(name)

    contexts = {prompts.shape[1]: prompts}
    subject = Noting(model, contexts, Calibration(None, progress=False), made={"bitnest": nested})
    return subject, asked


def test_what_is_measured_already_is_left_out() -> None:
    prompts = small_models.tokens(small_models.build("llama-gqa"), 2, 40)
    subject, asked = nested_subject(prompts)
    contenders = [CONTENDERS[name] for name in ("16-bit", "bitnest-kv8", "bitnest-kv4")]
    plan = Plan(contenders, [40], gamma=2, new_tokens=6, batch_size=2)
    results = Results({}, {})
    steps = list(run(subject, plan, results))
    nested = ["bitnest weights", "bitnest-kv8", "", "bitnest-kv4", ""]
    assert steps == ["16-bit weights", "16-bit", "", *nested]
    assert asked == ["16-bit", "bitnest"]
    first, kv8, kv4 = results.results
    assert first.perplexity is not None
    assert first.acceptance is None
    assert kv8.perplexity == kv4.perplexity, "their targets read the same"
    assert kv8.scored_tokens == 2 * 39
    for one in (kv8, kv4):
        assert one.tokens_per_round == pytest.approx(1 + 2 * one.slot_acceptance)
        assert one.new_tokens > 0

    kept = Results({}, {}, [first, kv8])
    assert list(run(subject, plan, kept)) == ["bitnest weights", "bitnest-kv4", ""]
    assert asked[2:] == ["bitnest"]
    assert replace(kept.results[2], seconds=0.0) == replace(kv4, seconds=0.0)
    assert list(run(subject, plan, kept)) == []


def test_ablations_vary_what_the_paper_varies() -> None:
    gammas = ablation("gamma", [2, 4, 2])
    assert [(one.gamma, one.kv(9)) for one in gammas] == [(2, "kv4/kv8"), (4, "kv4/kv8")]
    drafts = ablation("draft-kv", [])
    assert [one.kv(9) for one in drafts] == ["16/16", "kv8/kv8", "kv4/kv8"]
    assert all(one.drafts for one in drafts)
    targets = ablation("target-kv", [])
    assert [(one.kv(9), one.drafts) for one in targets] == [
        ("16/16", False),
        ("kv8/kv8", False),
        ("kv4/kv4", False),
        ("kv8/kv8", True),
        ("kv4/kv8", True),
        ("kv4/kv4", True),
    ]
    assert {one.weights for one in (*gammas, *drafts, *targets)} == {"bitnest"}


def test_tokens_over_those_of_the_target_alone() -> None:
    alone = Result("AR", "bitnest", "kv8/kv8", 100, 0, 1, 1, BytesRead(100, 20))
    assert over_target_alone(alone) == 1
    draft, verification = BytesRead(50, 10), BytesRead(100, 24)
    one = replace(alone, gamma=2, draft=draft, verification=verification)
    assert over_target_alone(one) is None
    one = replace(one, tokens_per_round=2.5)
    assert over_target_alone(one) == 120 * 2.5 / (2 * 60 + 124)
    # Three times as many heads of keys and values.
    assert over_target_alone(one, 3) == 160 * 2.5 / (2 * 80 + 172)


def test_the_baseline_does_not_draft() -> None:
    assert not BASELINE.drafts
    assert str(BASELINE.policy(77)) == "16/16"
