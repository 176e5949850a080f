"""Tuning the base: it learns, stays in bounds, and touches nothing but scales and codes."""

from typing import Any

import pytest
import small_models
import torch
from test_calibration import assert_no_trace
from torch import Tensor, nn
from transformers import PreTrainedModel

from nestq import bitnest_w4w8, nest_view, quantize_, tuning
from nestq.architectures import HEAD, describe
from nestq.nesting import NestedCodes, Nester
from nestq.recipes import NestedRecipe
from nestq.reference import weights as reference
from nestq.tuning import CODE_REACH, tune_base


@pytest.fixture
def model() -> PreTrainedModel:
    return small_models.build("llama-gqa", seed=3)


@pytest.fixture(autouse=True)
def few_tokens_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TOKENS_PER_STEP", 256)
    monkeypatch.setattr(tuning, "WARMUP_STEPS", 3)


def recipe(**options: Any) -> NestedRecipe:
    return bitnest_w4w8(**{"group_size": 32, "tuning_steps": 30, **options})


def rounded(model: PreTrainedModel, recipe: NestedRecipe) -> dict[str, NestedCodes]:
    architecture = describe(model)
    nester = Nester(recipe)
    for name, linear in [*architecture.named_linears(), (HEAD, architecture.head)]:
        nester.round_to_nearest(name, linear)
    return nester.codes


def windows(model: PreTrainedModel) -> Tensor:
    return small_models.tokens(model, 16, 32, seed=5)


def tune(
    model: PreTrainedModel, codes: dict[str, NestedCodes], options: NestedRecipe, **more: Any
) -> list[float]:
    return tune_base(
        describe(model),
        codes,
        windows(model),
        options,
        torch.device("cpu"),
        batch_size=4,
        progress=False,
        **more,
    )


@pytest.mark.parametrize("tune_codes", [False, True])
def test_it_learns_and_stays_in_bounds(model: PreTrainedModel, tune_codes: bool) -> None:
    options = recipe(tune_codes=tune_codes)
    codes = rounded(model, options)
    before = {name: (entry.base.clone(), entry.scale.clone()) for name, entry in codes.items()}
    losses = tune(model, codes, options)
    assert len(losses) == 30
    assert sum(losses[-5:]) < (0.6 if tune_codes else 0.9) * sum(losses[:5])
    linears = dict(model.named_modules())
    changed = 0
    for name, entry in codes.items():
        base, scale = before[name]
        assert entry.scale.dtype == scale.dtype == torch.bfloat16
        assert entry.scale.shape == scale.shape
        assert not torch.equal(entry.scale, scale)
        assert (entry.scale > 0).all()
        assert not entry.scale.requires_grad
        assert entry.base.dtype == torch.int8
        assert entry.base.min() >= -8
        assert entry.base.max() <= 7
        changed += int((entry.base != base).sum())
        if tune_codes:
            expanded = reference.expand_scale(entry.scale.float(), 32)[:, : base.shape[1]]
            ideal = linears[name].weight / expanded
            reach = CODE_REACH + 0.5 + 1e-5  # and rounding
            assert (entry.base <= (ideal + reach).clamp(min=-8)).all()
            assert (entry.base >= (ideal - reach).clamp(max=7)).all()
    assert (changed > 0) == tune_codes


def test_codes_out_of_reach_are_brought_back(model: PreTrainedModel) -> None:
    options = recipe(tune_codes=True, tuning_steps=1)
    codes = rounded(model, options)
    entry = codes[HEAD]
    expected = entry.base.clone()
    entry.base[:, 0] = -entry.base[:, 0].clamp(-7)  # the sign is wrong
    wrong = (entry.base - expected).abs() > 2
    assert wrong.any()
    tune(model, codes, options)
    assert ((entry.base - expected).abs() <= 2)[wrong].all()


@pytest.mark.parametrize("scale_dtype", ["float16", "float32"])
def test_scales_keep_their_dtype(model: PreTrainedModel, scale_dtype: str) -> None:
    options = recipe(tuning_steps=1, scale_dtype=scale_dtype)
    codes = rounded(model, options)
    tune(model, codes, options)
    assert {entry.scale.dtype for entry in codes.values()} == {options.torch_scale_dtype}


def test_the_teacher_is_left_as_it_was(model: PreTrainedModel) -> None:
    model.model.norm.weight.requires_grad_(False)
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    options = recipe(tuning_steps=2, tune_codes=True)
    tune(model, rounded(model, options), options)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.grad is None, name
        assert parameter.requires_grad == trainable[name]
    assert_no_trace(model)


def test_an_error_leaves_the_teacher(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = recipe()
    codes = rounded(model, options)
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}

    def fail(*args: Any) -> None:
        raise RuntimeError("stop")

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "quantize_activation", fail)
        with pytest.raises(RuntimeError, match="stop"):
            tune(model, codes, options)
    assert_no_trace(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable


def test_without_gradients_outside(model: PreTrainedModel) -> None:
    options = recipe(tuning_steps=1)
    with torch.no_grad():
        assert len(tune(model, rounded(model, options), options)) == 1


def test_the_draft_that_is_tuned_is_the_draft(model: PreTrainedModel) -> None:
    """The first loss is the divergence of what the draft view will compute."""
    options = recipe(tuning_steps=1)
    codes = rounded(model, options)
    expected = model(windows(model)).logits.log_softmax(-1)
    teacher_loss = tune(model, codes, options)
    fresh = small_models.build("llama-gqa", seed=3)
    quantize_(fresh, bitnest_w4w8(group_size=32, rotation="none"), progress=False)
    with nest_view("draft"), torch.no_grad():
        draft = fresh(windows(model)).logits.log_softmax(-1)
    rows = (expected.exp() * (expected - draft)).sum(-1).mean(-1)
    # A step sees 8 of the 16 rows.
    assert rows.min() <= teacher_loss[0] <= rows.max()


@pytest.mark.parametrize("seed", [0, 1])
def test_reproducible_by_seed(model: PreTrainedModel, seed: int) -> None:
    first, second = (rounded(model, recipe()) for _ in range(2))
    losses = tune(model, first, recipe(tuning_steps=2))
    assert (tune(model, second, recipe(tuning_steps=2, seed=seed)) == losses) == (seed == 0)
    assert torch.equal(first[HEAD].scale, second[HEAD].scale) == (seed == 0)


def test_rows_are_used_again_when_they_run_out(model: PreTrainedModel) -> None:
    rows = torch.arange(5).view(5, 1)
    batches = tuning._shuffled_batches(rows, 2, seed=0)
    seen = [next(batches) for _ in range(6)]
    assert [len(batch) for batch in seen] == [2, 2, 1, 2, 2, 1]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(torch.cat(epoch).flatten().tolist()) == [0, 1, 2, 3, 4]


def test_schedule() -> None:
    rates = [tuning._schedule(step, 100) for step in range(100)]
    assert rates[0] < rates[1] < rates[2]
    assert max(rates) <= 1
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert 0.03 <= rates[-1] < 0.04


@pytest.mark.parametrize("tune_codes", [False, True])
def test_quantize_reports_the_loss(tune_codes: bool) -> None:
    model = small_models.build("llama-gqa", tied=True)
    options = recipe(tuning_steps=12, tune_codes=tune_codes)
    report = quantize_(
        model, options, calibration=windows(model), calibration_length=32, progress=False
    )
    assert len(report.tuning_loss) == 12
    assert report.tuning_loss[-1] < report.tuning_loss[0]
    assert len(report.linears) == 15
    assert all(entry.target_error < entry.draft_error for entry in report.linears)
    assert "tuning" in report.seconds
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tuning_needs_calibration() -> None:
    model: nn.Module = small_models.build("llama-gqa")
    with pytest.raises(ValueError, match="tuning_steps needs calibration"):
        quantize_(model, recipe(), progress=False)
