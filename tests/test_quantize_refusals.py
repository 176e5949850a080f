"""What ``quantize_`` refuses, and that the model is as it was by then."""

import copy
from contextlib import nullcontext
from typing import Any

import nested_models
import pytest
import small_models
import torch
from quantized_models import RECIPE, calibration, distance, logits, neox, quantized
from test_calibration import REFUSED, assert_no_trace, letters
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from nestq import bitnest_w4w8, quantize_, w8a8
from nestq.architectures import UnsupportedArchitectureError, describe
from nestq.nesting import Nester
from nestq.quantize import UNCALIBRATED


def snapshot(model: nn.Module) -> tuple[dict[str, Tensor], str]:
    config = str(getattr(model, "config", ""))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, config


def assert_unchanged(model: nn.Module, before: tuple[dict[str, Tensor], str]) -> None:
    tensors, config = before
    assert model.state_dict().keys() == tensors.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name
    assert str(getattr(model, "config", "")) == config
    assert not hasattr(model, "hf_quantizer")
    assert_no_trace(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "with_tokenizer", "error", "message"), REFUSED)
def test_refused_calibration_leaves_the_model(
    given: Any, with_tokenizer: bool, error: type[Exception], message: str
) -> None:
    model = small_models.build("llama-gqa", tied=True)
    before = snapshot(model)
    tokenizer = letters() if with_tokenizer else None
    with pytest.raises(error, match=message):
        quantize_(model, RECIPE, calibration=given, tokenizer=tokenizer, progress=False)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"batch_size": 1.5}, ValueError, "batch_size must be"),
        ({"batch_size": True}, ValueError, "batch_size must be"),
        ({"calibration_length": 0}, ValueError, "calibration_length must be"),
        ({"calibration": 5}, TypeError, "calibration must be a list .* got int"),
        ({"tokenizer": "x"}, TypeError, "tokenizer must be a transformers tokenizer, got str"),
        ({"device": 3.5}, ValueError, r"device 3\.5 cannot be used"),
        ({"device": "meta"}, ValueError, "device 'meta' cannot be used"),
        ({"device": "nowhere"}, ValueError, "device 'nowhere' cannot be used"),
        ({"recipe": "bitnest"}, TypeError, "recipe must be .* got str"),
        ({"recipe": bitnest_w4w8(tuning_steps=1), "calibration": None}, ValueError, "tuning_steps"),
    ],
)
def test_refused_arguments_leave_the_model(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = small_models.build("llama-gqa", tied=True)
    before = snapshot(model)
    arguments = {"recipe": RECIPE, "calibration": calibration(model), **options}
    with pytest.raises(error, match=message):
        quantize_(model, progress=False, **arguments)
    assert_unchanged(model, before)


def test_a_size_without_a_hadamard_matrix_leaves_the_model() -> None:
    model = small_models.build("llama-gqa", tied=True, hidden_size=188)
    before = snapshot(model)
    with pytest.raises(ValueError, match="no Hadamard matrix of size 188"):
        quantize_(
            model,
            bitnest_w4w8(rotation="hadamard"),
            calibration=calibration(model),
            progress=False,
        )
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("calibration", [[1, 2]], r"expected None, got \[\[1, 2\]\]"),
        ("calibration", torch.ones(2, 2), "expected None, got tensor"),
        ("tokenizer", letters(), "expected None, got"),
        ("calibration_length", 64, "expected 512, got 64"),
        ("batch_size", 1, "expected 8, got 1"),
        ("device", "cpu", "expected None, got 'cpu'"),
    ],
)
def test_w8a8_refuses_what_it_would_ignore(name: str, value: Any, message: str) -> None:
    model = small_models.build("llama-gqa", tied=True)
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"^{name} does not apply to w8a8\(\).*{message}"):
        quantize_(model, w8a8(), **{name: value})
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("recipe", "calibrated"),
    [(bitnest_w4w8(), False), (bitnest_w4w8(rotation="none"), True), (w8a8(), False)],
)
def test_an_unknown_architecture_is_refused(recipe: Any, calibrated: bool) -> None:
    model = neox()
    before = snapshot(model)
    given = calibration(model) if calibrated else None
    with pytest.raises(UnsupportedArchitectureError, match="GPTNeoXForCausalLM"):
        quantize_(model, recipe, calibration=given, progress=False)
    assert_unchanged(model, before)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        quantize_(nn.Linear(4, 4), RECIPE)
    with pytest.raises(TypeError, match=r"model must be .* got NoneType"):
        quantize_(None, RECIPE)  # type: ignore[arg-type]


def test_a_model_with_compiled_parts_is_refused() -> None:
    model = small_models.build("llama-gqa", tied=True)
    before = snapshot(model)
    original = model.model.layers[1]
    model.model.layers[1] = torch.compile(original)
    with pytest.raises(ValueError, match=r"model\.layers\.1\._orig_mod is in a part that"):
        quantize_(model, RECIPE, calibration=calibration(model), progress=False)
    model.model.layers[1] = original
    assert_unchanged(model, before)


def test_a_model_of_conv1d_is_refused() -> None:
    with torch.random.fork_rng(devices=[]):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=48, n_layer=1, n_head=4)).eval()
    before = snapshot(model)
    with pytest.raises(UnsupportedArchitectureError, match=r"h\.0\.attn\.c_attn .* Conv1D"):
        quantize_(model, bitnest_w4w8(rotation="none"), progress=False)
    assert_unchanged(model, before)


@pytest.mark.parametrize("recipe", [RECIPE, bitnest_w4w8(rotation="none"), w8a8(rotation="none")])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named(recipe: Any, value: float) -> None:
    model = small_models.build("llama-gqa", tied=True)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    before = model.state_dict()["model.embed_tokens.weight"].clone()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight must be finite"):
        quantize_(model, recipe, progress=False)
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], before)
    assert describe(model).tied
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("recipe", [RECIPE, w8a8(), w8a8(rotation="none")])
def test_a_nested_model_is_refused(recipe: Any) -> None:
    model = quantized()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj is nested already"):
        quantize_(model, recipe, progress=False)
    nested_models.assert_same_model(model, before)


@pytest.mark.parametrize("recipe", [RECIPE, w8a8()])
def test_a_meta_model_is_refused(recipe: Any) -> None:
    model = small_models.build("llama-gqa").to("meta")
    with pytest.raises(ValueError, match=r"q_proj\.weight is on the meta device"):
        quantize_(model, recipe, progress=False)


@pytest.mark.parametrize("stage", ["base_and_refinement", "round_to_nearest", "base", "refinement"])
@pytest.mark.parametrize("call", [1, 4])
def test_an_error_on_the_way_leaves_the_function(
    stage: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_models.build("llama-gqa", tied=True).train()
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    original, calls = getattr(Nester, stage), []

    def fail(self: Nester, *args: Any) -> Any:
        calls.append(args)
        if len(calls) > call:
            raise RuntimeError("stop")
        return original(self, *args)

    monkeypatch.setattr(Nester, stage, fail)
    recipe = bitnest_w4w8(group_size=32, tuning_steps=int(stage in ("base", "refinement")))
    given = None if stage == "round_to_nearest" else calibration(model)
    warned = nullcontext() if given is not None else pytest.warns(match=UNCALIBRATED)
    with warned, pytest.raises(RuntimeError, match="stop"):
        quantize_(model, recipe, calibration=given, progress=False)
    assert_no_trace(model)
    assert all(module.training for module in model.modules())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.model.parameters())
    # Rotated, so equal up to float32 noise through two layers.
    assert distance(logits(model, tokens), expected) < 1e-5
