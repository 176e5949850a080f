"""``quantize_`` end to end: every family, every refusal, and what is left of the model."""

import copy
from pathlib import Path
from typing import Any

import nested_models
import pytest
import small_models
import torch
import torchao.quantization
from test_calibration import REFUSED, assert_no_trace, letters
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

import nestq
from nestq import bitnest_w4w8, quantize_, w8a8
from nestq.architectures import UnsupportedArchitectureError, describe
from nestq.hf_quantizer import nested_weights
from nestq.nesting import Nester
from nestq.report import QuantizationReport
from nestq.tensor import NestedQuantTensor

RECIPE = bitnest_w4w8(group_size=32)


def calibration(model: PreTrainedModel) -> Tensor:
    return small_models.tokens(model, 16, 64, seed=1)


def quantized(family: str = "llama-gqa", recipe: Any = RECIPE, **options: Any) -> PreTrainedModel:
    model = small_models.build(family)
    quantize_(model, recipe, **{"calibration": calibration(model), "progress": False, **options})
    return model


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).logits.float()


def distance(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


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


# It works.


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_every_family(family: str, tied: bool) -> None:
    model = small_models.build(family, tied=tied)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    report = quantize_(model, RECIPE, calibration=calibration(model), progress=False)

    architecture = describe(model)
    names = [*dict(architecture.named_linears()), "lm_head"]
    assert [entry.name for entry in report.linears] == names
    assert set(nested_weights(model)) == set(names)
    assert report.calibration_tokens == 16 * 64
    assert report.notes == []
    assert type(architecture.embedding.weight) is nn.Parameter
    assert model.config.tie_word_embeddings is False
    assert_no_trace(model)
    for entry in report.linears:
        assert entry.target_error < entry.draft_error < 0.2, entry
        assert entry.damping == RECIPE.damping
        assert entry.dead_columns == 0

    target = nested_models.logits(model, "target")
    assert torch.equal(target, logits(model, tokens))
    # INT8 activations cost about 1% in each of 14 linears: 4% in all. A draft is further away.
    assert distance(target, expected) < 0.1
    assert distance(target, expected) < 0.7 * distance(
        nested_models.logits(model, "draft"), expected
    )

    sequences = [
        nestq.speculative_generate(model, tokens[:1, :8], gamma=gamma, max_new_tokens=12)
        for gamma in (0, 4)
    ]
    assert torch.equal(sequences[0], sequences[1])
    assert sequences[0].shape[1] > 8


def test_the_three_lines() -> None:
    model = small_models.build("llama-gqa")
    eager = small_models.tokens(model, 1, 8)
    quantize_(model, RECIPE, calibration=["abc" * 30, "hgfe" * 30], tokenizer=letters())
    expected = nestq.speculative_generate(model, eager, max_new_tokens=8)
    compiled = torch.compile(model, backend="eager")
    output = nestq.speculative_generate(compiled, eager, max_new_tokens=8)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 128},
        {"refinement": "closed_form"},
        {"rotation": "none"},
        {"quantize_head": False},
        {"scale_dtype": "float32", "overlap": 12},
        {"tuning_steps": 2, "tune_codes": True},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_options(options: dict[str, Any], tied: bool) -> None:
    model = small_models.build("qwen2", tied=tied)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    recipe = bitnest_w4w8(**{"group_size": 32, **options})
    report = quantize_(model, recipe, calibration=calibration(model), progress=False)
    assert distance(logits(model, tokens), expected) < 0.15
    assert ("lm_head" in nested_weights(model)) == recipe.quantize_head
    assert type(describe(model).embedding.weight) is nn.Parameter
    for weight in nested_weights(model).values():
        assert weight.group_size == recipe.group_size
        assert weight.overlap == recipe.target_overlap
        assert weight.scale.dtype == recipe.torch_scale_dtype
    assert len(report.tuning_loss) == recipe.tuning_steps
    assert model.config.quantization_config.recipe == recipe.to_dict()
    assert model.config.quantization_config.report == report.to_dict()


def test_a_hadamard_rotation() -> None:
    model = small_models.build("llama-gqa", hidden_size=64)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    recipe = bitnest_w4w8(group_size=32, rotation="hadamard")
    quantize_(model, recipe, calibration=calibration(model), progress=False)
    assert distance(logits(model, tokens), expected) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = small_models.build("llama-gqa", dtype=dtype)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    expected = logits(model, small_models.tokens(model))
    quantize_(model, RECIPE, calibration=calibration(model), progress=False)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert distance(logits(model, small_models.tokens(model)), expected) < 0.1


def test_a_residual_stream_that_cannot_be_rotated_is_noted() -> None:
    model = small_models.build("gemma2", sliding_window=8)
    expected = logits(model, small_models.tokens(model))
    report = quantize_(model, RECIPE, calibration=calibration(model), progress=False)
    assert any("residual stream is not rotated" in note for note in report.notes)
    assert distance(logits(model, small_models.tokens(model)), expected) < 0.1


def test_a_compiled_model_is_nested_inside() -> None:
    model = small_models.build("llama-gqa")
    quantize_(torch.compile(model, backend="eager"), RECIPE, progress=False)
    assert nested_weights(model)


def test_calibration_fits_the_inputs_that_it_saw() -> None:
    # Inputs of the first layer that span 12 of its 48 dimensions: compensation can put the error of
    # rounding into the other 36, rounding to nearest cannot.
    tokens = torch.randint(0, 12, (16, 64), generator=torch.Generator().manual_seed(0))
    errors = []
    for options in ({"calibration": tokens}, {}):
        model = small_models.build("llama-gqa")
        report = quantize_(model, RECIPE, progress=False, **options)
        layer = model.model.layers[0]
        inputs = layer.input_layernorm(model.model.embed_tokens(tokens)).detach()
        weight = layer.self_attn.q_proj.weight
        # The rotated dense weight, which is the same for both, to the refinement's resolution.
        target = inputs @ weight.dequantize("target").T
        errors.append(distance(inputs @ weight.dequantize("draft").T, target))
        assert report.linears[0].name.endswith("q_proj")
    calibrated, nearest = errors
    assert calibrated < 0.5 * nearest


def test_reproducible_by_seed() -> None:
    nested_models.assert_same_model(quantized(), quantized())
    other = quantized(recipe=bitnest_w4w8(group_size=32, seed=1))
    ours = nested_weights(quantized())
    assert all(
        not torch.equal(weight.base, ours[name].base)
        for name, weight in nested_weights(other).items()
    )


def test_the_batch_size_is_only_float_noise() -> None:
    one, eight = quantized(batch_size=1), quantized(batch_size=8)
    for name, weight in nested_weights(one).items():
        other = nested_weights(eight)[name]
        # Noise in a Hessian flips codes that lie near a tie, and each flip moves others.
        assert (weight.dequantize() - other.dequantize()).norm() < 0.1 * other.dequantize().norm()
    tokens = small_models.tokens(one)
    assert distance(logits(one, tokens), logits(eight, tokens)) < 0.1


def test_calibration_forms_agree() -> None:
    rows = calibration(small_models.build("llama-gqa"))
    forms = [rows, rows.tolist(), list(rows), rows.flatten()]
    models = [quantized(calibration=form, calibration_length=64) for form in forms]
    for model in models[1:]:
        nested_models.assert_same_model(models[0], model)


# Without calibration.


def test_round_to_nearest_says_what_is_lost() -> None:
    model = small_models.build("llama-gqa")
    expected = logits(model, small_models.tokens(model))
    report = quantize_(model, RECIPE, progress=False)
    assert any("no calibration was given" in note for note in report.notes)
    assert report.calibration_tokens == 0
    assert all(entry.damping is None for entry in report.linears)
    assert len(nested_weights(model)) == len(report.linears) == 15
    assert distance(logits(model, small_models.tokens(model)), expected) < 0.1


def neox() -> PreTrainedModel:
    """Of an architecture that is not known."""
    config = GPTNeoXConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=100,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPTNeoXForCausalLM(config).eval()


@pytest.mark.parametrize("head", [True, False])
def test_an_unknown_architecture_without_rotation(head: bool) -> None:
    model = neox()
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    recipe = bitnest_w4w8(group_size=32, rotation="none", quantize_head=head)
    quantize_(model, recipe, progress=False)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 5
    for name, linear in linears.items():
        is_head = linear is model.get_output_embeddings()
        assert isinstance(linear.weight, NestedQuantTensor) == (head or not is_head), name
    assert distance(logits(model, tokens), expected) < 0.1


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


# Refusals.


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
        ({"calibration_length": 0}, ValueError, "calibration_length must be"),
        ({"device": "nowhere"}, ValueError, "device 'nowhere' cannot be used"),
        ({"recipe": "bitnest"}, TypeError, "recipe must be .* got str"),
        ({"recipe": bitnest_w4w8(tuning_steps=1), "calibration": None}, ValueError, "tuning_steps"),
        ({"recipe": bitnest_w4w8(rotation="hadamard")}, ValueError, "48|hadamard|Hadamard"),
    ],
)
def test_refused_arguments_leave_the_model(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    size = {"hidden_size": 4 * 47} if "adamard" in message else {}
    model = small_models.build("llama-gqa", tied=True, **size)
    before = snapshot(model)
    arguments = {"recipe": RECIPE, "calibration": calibration(model), **options}
    with pytest.raises(error, match=message.replace("48|", "188|")):
        quantize_(model, progress=False, **arguments)
    assert_unchanged(model, before)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got Linear"):
        quantize_(nn.Linear(4, 4), RECIPE)


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
    model = small_models.build("llama-gqa", tied=True)
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
    with pytest.raises(RuntimeError, match="stop"):
        quantize_(model, recipe, calibration=given, progress=False)
    assert_no_trace(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.model.parameters())
    # Rotated, so equal up to float32 noise through two layers.
    assert distance(logits(model, tokens), expected) < 1e-5


# torchao's own function, one module at a time.


def test_torchao_quantize(tmp_path: Path) -> None:
    model = small_models.build("llama-gqa")
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    torchao.quantization.quantize_(model, RECIPE)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 15
    assert all(isinstance(linear.weight, NestedQuantTensor) for linear in linears)
    target, draft = (nested_models.logits(model, view) for view in ("target", "draft"))
    assert distance(target, expected) < 0.1
    assert distance(target, expected) < 0.7 * distance(draft, expected)

    nestq.save(model, tmp_path / "model")
    loaded = nestq.load(tmp_path / "model")
    for view, logits_before in (("target", target), ("draft", draft)):
        assert torch.equal(nested_models.logits(loaded, view), logits_before)


def test_torchao_quantize_of_a_bare_linear() -> None:
    linear = nn.Linear(75, 12)
    weight = linear.weight.detach().clone()
    torchao.quantization.quantize_(linear, RECIPE)
    assert isinstance(linear.weight, NestedQuantTensor)
    assert distance(linear.weight.dequantize(), weight) < 0.02


def test_torchao_quantize_refuses() -> None:
    embedding = nn.Sequential(nn.Embedding(4, 4))
    with pytest.raises(TypeError, match=r"nn\.Linear only, got Embedding"):
        torchao.quantization.quantize_(embedding, RECIPE, lambda m, _: isinstance(m, nn.Embedding))
    linear = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="tuning_steps needs"):
        torchao.quantization.quantize_(linear, bitnest_w4w8(tuning_steps=1))
    assert type(linear[0].weight) is nn.Parameter


# Plain W8A8.


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("rotation", ["orthogonal", "none"])
def test_w8a8(head: bool, rotation: Any) -> None:
    model = small_models.build("llama-gqa", tied=True)
    tokens = small_models.tokens(model)
    expected = logits(model, tokens)
    report = quantize_(model, w8a8(rotation=rotation, quantize_head=head))
    assert isinstance(report, QuantizationReport)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            dense = type(module.weight) is nn.Parameter
            assert dense == (name == "lm_head" and not head), name
            assert dense or type(module.weight).__module__.startswith("torchao")
    assert type(model.model.embed_tokens.weight) is nn.Parameter
    assert 0 < distance(logits(model, tokens), expected) < 0.1
