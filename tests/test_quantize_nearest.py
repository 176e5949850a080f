"""Quantizing without calibration: to nearest, one module at a time by torchao, and plain W8A8."""

import warnings
from pathlib import Path
from typing import Any

import nested_models
import pytest
import small_models
import torch
import torchao.quantization
from quantized_models import (
    AMPLIFICATION,
    INT8_ERROR,
    LINEARS,
    RECIPE,
    budget,
    distance,
    logits,
    neox,
)
from torch import nn

import nestq
from nestq import bitnest_w4w8, quantize_, w8a8
from nestq.architectures import describe
from nestq.hf_quantizer import nested_weights
from nestq.nesting import Nester
from nestq.quantize import UNCALIBRATED
from nestq.tensor import NestedQuantTensor


def test_round_to_nearest_says_what_is_lost() -> None:
    model = small_models.build("llama-gqa")
    expected = logits(model, small_models.tokens(model))
    with pytest.warns(UserWarning, match=UNCALIBRATED) as warned:
        report = quantize_(model, RECIPE, progress=False)
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
    assert report.notes == [UNCALIBRATED]
    assert report.calibration_tokens == report.hessian_tokens == 0
    assert all(entry.damping is None for entry in report.linears)
    assert len(nested_weights(model)) == len(report.linears) == LINEARS
    assert distance(logits(model, small_models.tokens(model)), expected) < budget(report)


@pytest.mark.parametrize("refinement", ["compensated", "closed_form"])
def test_the_saved_recipe_says_what_was_done(refinement: str) -> None:
    model = small_models.build("llama-gqa")
    recipe = bitnest_w4w8(group_size=32, refinement=refinement, overlap=8)
    with pytest.warns(UserWarning, match=UNCALIBRATED):
        quantize_(model, recipe, progress=False)
    saved = model.config.quantization_config.recipe
    assert saved == {**recipe.to_dict(), "refinement": "closed_form"}
    assert all(weight.overlap == 8 for weight in nested_weights(model).values())


def test_rounding_is_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    original = Nester.round_to_nearest

    def record(self: Nester, name: str, linear: nn.Linear, device: torch.device | None) -> None:
        devices.append(device)
        original(self, name, linear, device)

    monkeypatch.setattr(Nester, "round_to_nearest", record)
    with pytest.warns(UserWarning, match=UNCALIBRATED):
        quantize_(small_models.build("llama-gqa"), RECIPE, device="cpu", progress=False)
    assert devices == [torch.device("cpu")] * LINEARS


@pytest.mark.parametrize("head", [True, False])
def test_an_unknown_architecture_without_rotation(head: bool) -> None:
    model = neox()
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    recipe = bitnest_w4w8(group_size=32, rotation="none", quantize_head=head)
    with pytest.warns(UserWarning, match=UNCALIBRATED):
        report = quantize_(model, recipe, progress=False)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 5
    for name, linear in linears.items():
        is_head = linear is model.get_output_embeddings()
        assert isinstance(linear.weight, NestedQuantTensor) == (head or not is_head), name
    assert distance(logits(model, tokens), expected) < budget(report)


# torchao's own function, one module at a time.


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({}, "refinement='compensated', rotation='orthogonal', damping=0.01"),
        ({"rotation": "none", "damping": 0.1}, "refinement='compensated', damping=0.1"),
        ({"refinement": "closed_form", "overlap": 8}, "rotation='orthogonal', damping=0.01"),
    ],
)
def test_torchao_quantize_rounds_to_nearest_and_says_so(
    options: dict[str, Any], ignored: str
) -> None:
    model, expected = small_models.build("llama-gqa"), small_models.build("llama-gqa")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        torchao.quantization.quantize_(model, bitnest_w4w8(group_size=32, **options))
    (warning,) = [entry for entry in warned if "one linear at a time" in str(entry.message)]
    assert f"Not applied: {ignored}. nestq.quantize_" in str(warning.message)
    assert "Save the model with nestq.save" in str(warning.message)
    with pytest.warns(UserWarning, match=UNCALIBRATED):
        quantize_(expected, bitnest_w4w8(group_size=32, rotation="none"), progress=False)
    assert len(nested_weights(model)) == LINEARS
    nested_models.assert_same_model(model, expected)


def test_torchao_quantize_is_saved_by_nestq(tmp_path: Path) -> None:
    model = small_models.build("llama-gqa")
    with pytest.warns(UserWarning, match="one linear at a time"):
        torchao.quantization.quantize_(model, RECIPE)
    expected = {view: nested_models.logits(model, view) for view in ("target", "draft")}
    nestq.save(model, tmp_path / "model")
    loaded = nestq.load(tmp_path / "model")
    for view, before in expected.items():
        assert torch.equal(nested_models.logits(loaded, view), before)


def test_torchao_quantize_of_a_bare_linear() -> None:
    linear = nn.Linear(75, 12)
    weight = linear.weight.detach().clone()
    with pytest.warns(UserWarning, match="one linear at a time"):
        torchao.quantization.quantize_(linear, RECIPE)
    assert isinstance(linear.weight, NestedQuantTensor)
    # These weights are uniform. A target step is 1/56 of the largest, rounding errs by 1/sqrt(12)
    # of it, and their RMS is 1/sqrt(3) of the largest: 0.9%. Searched scales may clip a few.
    assert distance(linear.weight.dequantize(), weight) < 0.012


def test_torchao_quantize_leaves_the_head_to_a_filter() -> None:
    model = small_models.build("llama-gqa", tied=True)
    with pytest.warns(UserWarning, match="one linear at a time"):
        torchao.quantization.quantize_(
            model, RECIPE, lambda m, name: isinstance(m, nn.Linear) and name != "lm_head"
        )
    assert len(nested_weights(model)) == LINEARS - 1
    assert describe(model).tied


def test_torchao_quantize_refuses() -> None:
    embedding = nn.Sequential(nn.Embedding(4, 4))
    with pytest.raises(TypeError, match=r"nn\.Linear only, got Embedding"):
        torchao.quantization.quantize_(embedding, RECIPE, lambda m, _: isinstance(m, nn.Embedding))
    linear = nn.Sequential(nn.Linear(4, 4))
    for options, message in (
        ({"tuning_steps": 1}, "tuning_steps needs"),
        ({"quantize_head": False}, "quantize_head=False needs the whole model.*filter_fn"),
    ):
        with pytest.raises(ValueError, match=message):
            torchao.quantization.quantize_(linear, bitnest_w4w8(**options))
        assert type(linear[0].weight) is nn.Parameter


# Plain W8A8.


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("rotation", ["orthogonal", "none"])
def test_w8a8(head: bool, rotation: Any) -> None:
    model = small_models.build("llama-gqa", tied=True)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    report = quantize_(model, w8a8(rotation=rotation, quantize_head=head))
    assert report.linears == ()
    assert report.seconds.keys() == {"rotation", "rounding"}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            dense = type(module.weight) is nn.Parameter
            assert dense == (name == "lm_head" and not head), name
            assert dense or type(module.weight).__module__.startswith("torchao")
    assert type(model.model.embed_tokens.weight) is nn.Parameter
    assert describe(model).tied == (rotation == "none" and not head)
    assert model.config.tie_word_embeddings == describe(model).tied
    # INT8 weights and INT8 activations.
    allowed = AMPLIFICATION * (LINEARS * 2 * INT8_ERROR**2) ** 0.5
    assert 0 < distance(logits(model, tokens), expected) < allowed
