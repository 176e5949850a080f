"""End-to-end tuning of the base: it lowers the divergence and breaks nothing it may not touch."""

import copy
from typing import Any

import pytest
import small_models
import torch
from test_calibration import assert_no_trace
from transformers import PreTrainedModel

from nestq import bitnest_w4w8, nest_view, quantize_, tuning
from nestq.architectures import HEAD, describe
from nestq.calibration import LayerInputs, sweep_layers
from nestq.nesting import NestedCodes, Nester, install
from nestq.reference import weights as reference

STEPS = 12


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TOKENS_PER_STEP", 256)


def based(**options: Any) -> tuple[PreTrainedModel, Nester, torch.Tensor]:
    """A small model and the bases of its linears."""
    model = small_models.build("llama-gqa")
    recipe = bitnest_w4w8(group_size=32, tuning_steps=STEPS, **options)
    windows = small_models.tokens(model, 8, 32, seed=1)
    architecture = describe(model)
    nester = Nester(recipe)
    inputs = LayerInputs(architecture, windows, 4, torch.device("cpu"))
    sweep_layers(
        architecture, inputs, nester.base, with_head=True, description="base", progress=False
    )
    return model, nester, windows


def tune(model: PreTrainedModel, nester: Nester, windows: torch.Tensor) -> list[float]:
    device = torch.device("cpu")
    return tuning.tune_base(
        describe(model), nester.codes, windows, nester.recipe, device, 4, progress=False
    )


@pytest.mark.parametrize("tune_codes", [False, True])
def test_the_draft_comes_closer(tune_codes: bool) -> None:
    model, nester, windows = based(tune_codes=tune_codes)
    losses = tune(model, nester, windows)
    assert len(losses) == STEPS
    assert min(losses) > 0
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("tune_codes", [False, True])
def test_only_scales_and_codes_change(tune_codes: bool) -> None:
    model, nester, windows = based(tune_codes=tune_codes)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = {n: NestedCodes(c.base.clone(), c.scale.clone()) for n, c in nester.codes.items()}
    tune(model, nester, windows)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, dense[name]), name
    for name, linear in describe(model).named_linears():
        assert "forward" not in vars(linear), name
    for name, codes in nester.codes.items():
        assert codes.scale.dtype == before[name].scale.dtype == torch.bfloat16
        assert codes.base.dtype == torch.int8
        assert torch.equal(codes.base, before[name].base) or tune_codes
    assert any(not torch.equal(c.scale, before[n].scale) for n, c in nester.codes.items())


def test_tuned_codes_stay_where_the_refinement_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CODE_LEARNING_RATE", 1.0)  # pushes every code as far as it may go
    model, nester, windows = based(tune_codes=True)
    before = {name: codes.base.clone() for name, codes in nester.codes.items()}
    tune(model, nester, windows)
    assert any(not torch.equal(c.base, before[n]) for n, c in nester.codes.items())
    low, high = reference.code_range(4)
    linears = dict(describe(model).named_linears())
    for name, codes in nester.codes.items():
        assert low <= codes.base.min()
        assert codes.base.max() <= high
        if name in linears:
            scale = reference.expand_scale(codes.scale.float(), 32)[:, : codes.base.shape[1]]
            ideal = reference.divide_by_scale(linears[name].weight.detach().float(), scale)
            inside = (ideal > low) & (ideal < high)
            far = (codes.base - ideal).abs()[inside]
            assert far.max() <= tuning.CODE_REACH + 0.5 + 1e-3


def test_the_teacher_gathers_no_gradient() -> None:
    model, nester, windows = based()
    model.model.norm.weight.requires_grad_(False)
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    with torch.no_grad():  # as a caller may have it
        tune(model, nester, windows)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_leaves_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    model, nester, windows = based()
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(windows).logits

    def fail(x: torch.Tensor) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr(tuning, "quantize_activation", fail)
    with pytest.raises(RuntimeError, match="stop"):
        tune(model, nester, windows)
    assert_no_trace(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable
    with torch.no_grad():
        assert torch.equal(model(windows).logits, expected)


def test_the_loss_is_the_divergence_of_the_draft_view() -> None:
    model, nester, windows = based()
    for codes in nester.codes.values():
        codes.scale *= 0.5  # so far away that the divergence depends on its direction
    with torch.no_grad():
        teacher = model(windows).logits.log_softmax(-1)
    loss = tune(model, copy.deepcopy(nester), windows)[0]  # all 8 rows are in each step
    architecture = describe(model)
    for name, linear in [*architecture.named_linears(), (HEAD, architecture.head)]:
        nester.codes[name].refinement = torch.zeros_like(nester.codes[name].base)
        install({name: linear}, nester.codes, nester.recipe)
    with nest_view("draft"), torch.no_grad():
        draft = model(windows).logits.log_softmax(-1)
    divergence = (teacher.exp() * (teacher - draft)).sum(-1).mean().item()
    other_way = (draft.exp() * (draft - teacher)).sum(-1).mean().item()
    assert abs(other_way - divergence) > 0.01 * divergence
    # Float noise flips a few INT8 codes.
    assert loss == pytest.approx(divergence, rel=2e-3)


def test_gradients_pass_through_rounding() -> None:
    model, nester, _ = based(tune_codes=True)
    name, linear = next(describe(model).named_linears())
    tuned = tuning._TunedLinear(linear, nester.codes[name], nester.recipe, torch.device("cpu"))
    x = torch.randn(3, linear.in_features, requires_grad=True)
    tuned(x).square().sum().backward()
    for gradient in (x.grad, tuned.log_factor.grad, tuned.latent.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


def test_seed_orders_the_rows() -> None:
    rows = torch.arange(6)[:, None]

    def order(seed: int) -> list[int]:
        batches = tuning._shuffled_batches(rows, 4, seed)
        return torch.cat([next(batches) for _ in range(4)]).flatten().tolist()

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert sorted(order(0)) == sorted([*range(6), *range(6)])


def test_tuning_needs_calibration() -> None:
    model = small_models.build("llama-gqa")
    with pytest.raises(ValueError, match="tuning_steps needs calibration="):
        quantize_(model, bitnest_w4w8(tuning_steps=1), progress=False)
