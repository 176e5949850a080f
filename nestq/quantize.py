"""``quantize_``: nest the linears of a model in place."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.transform_module import register_quantize_module_handler
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nestq.architectures import (
    HEAD,
    Architecture,
    UnsupportedArchitectureError,
    describe,
    unwrap,
)
from nestq.calibration import LayerInputs, calibration_windows, sweep_layers
from nestq.hf_quantizer import attach
from nestq.nesting import Nester, install
from nestq.recipes import NestedRecipe, W8A8Recipe
from nestq.report import QuantizationReport
from nestq.rotation import Rotation, rotate_, untie_
from nestq.tensor import NestedQuantTensor, check_weight
from nestq.tuning import tune_base

# Tokens that the Hessians are made from, at most: in trials more than this hardly changed
# acceptance. Tuning uses all of the calibration.
HESSIAN_TOKENS = 1 << 18

UNCALIBRATED = (
    "no calibration was given: weights are rounded to nearest, and the draft will be accepted far "
    "less often than with calibration=texts"
)


def quantize_(
    model: nn.Module,
    recipe: NestedRecipe | W8A8Recipe,
    *,
    calibration: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    calibration_length: int = 512,
    batch_size: int = 8,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Nest the linears of a Hugging Face causal LM in place.

    The model is rotated (R1, R2), its linears are quantized layer by layer on calibration text,
    and their weights become :class:`NestedQuantTensor`. Embedding rows keep their dtype; a tied
    head is untied. Weights are replaced after the last one is ready: if anything fails before, the
    model still computes its own function, though it may be rotated.

    Args:
        model: a causal LM; ``torch.compile`` it afterwards, not before.
        recipe: ``bitnest_w4w8()``, or ``w8a8()`` for the plain reference.
        calibration: texts, chats, token ids or a ``datasets`` dataset (see
            ``nestq.calibration.calibration_windows``). None rounds to nearest, with a note.
        tokenizer: for calibration texts.
        calibration_length: tokens in a calibration row, at most.
        batch_size: calibration rows that go through a layer at once.
        device: where layers are quantized, one at a time; default: where the model is.
        progress: show progress bars.

    Returns:
        A report with one entry a linear.

    Raises:
        TypeError, ValueError: an argument is off; the model is unchanged (rotated, at most, where
            scales overflow ``scale_dtype``).
        UnsupportedArchitectureError: the model's structure is unknown, and the recipe needs it.
        CalibrationError: calibration met NaN, infinity or a singular layer.
    """
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if isinstance(recipe, W8A8Recipe):
        return _quantize_w8a8(model, recipe)
    if not isinstance(recipe, NestedRecipe):
        raise TypeError(f"recipe must be bitnest_w4w8() or w8a8(), got {type(recipe).__name__}")
    for argument, value in (("calibration_length", calibration_length), ("batch_size", batch_size)):
        if not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{argument} must be an int >= 1, got {value!r}")
    where = None if device is None else usable_device(device)
    if recipe.tuning_steps and calibration is None:
        raise ValueError("recipe: tuning_steps needs calibration=, got None")
    notes: list[str] = []
    architecture = _architecture(model, needed=calibration is not None, recipe=recipe)
    linears = _linears(model, architecture, recipe)
    for name, linear in linears.items():
        _check_linear(name, linear)
    windows = None
    if calibration is not None:
        config: Any = model.config
        limit = getattr(config, "max_position_embeddings", calibration_length)
        windows = calibration_windows(
            calibration, tokenizer, config.vocab_size, min(calibration_length, limit)
        )
    else:
        notes.append(UNCALIBRATED)

    seconds: dict[str, float] = {}
    if architecture is not None:
        with _timed(seconds, "rotation"):
            notes += _rotate(model, architecture, recipe.rotation, recipe.seed)
    nester = Nester(recipe)
    losses: list[float] = []
    if windows is None:
        with _timed(seconds, "rounding"):
            for name, linear in tqdm(linears.items(), desc="round", disable=not progress):
                nester.round_to_nearest(name, linear)
    else:
        assert architecture is not None
        observed = windows[: max(1, HESSIAN_TOKENS // windows.shape[1])]
        compute = where or architecture.embedding.weight.device

        def sweep(process: Callable[..., list[Tensor]], description: str) -> None:
            with _timed(seconds, description):
                sweep_layers(
                    architecture,
                    LayerInputs(architecture, observed, batch_size, compute),
                    process,
                    with_head=recipe.quantize_head,
                    description=description,
                    progress=progress,
                )

        if recipe.tuning_steps:
            sweep(nester.base, "base")
            with _timed(seconds, "tuning"):
                losses = tune_base(
                    architecture, nester.codes, windows, recipe, compute, batch_size, progress
                )
            sweep(nester.refinement, "refinement")
        else:
            sweep(nester.base_and_refinement, "base and refinement")

    install(linears, nester.codes, recipe)
    report = QuantizationReport(
        linears=nester.reports,
        calibration_tokens=0 if windows is None else windows.numel(),
        seconds=seconds,
        notes=notes,
        tuning_loss=losses,
    )
    attach(model, recipe=recipe.to_dict(), report=report.to_dict())
    return report


def usable_device(device: torch.device | str) -> torch.device:
    """The device, once something has been put there.

    Raises:
        ValueError: nothing can be put there.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(f"device {device!r} cannot be used: {error}") from error


def _architecture(
    model: nn.Module, needed: bool, recipe: NestedRecipe | W8A8Recipe
) -> Architecture | None:
    """The model's parts; None if they are unknown and neither rotation nor GPTQ needs them."""
    try:
        return describe(model)
    except UnsupportedArchitectureError:
        if needed or recipe.rotation != "none":
            raise
        return None


def _linears(
    model: PreTrainedModel, architecture: Architecture | None, recipe: NestedRecipe | W8A8Recipe
) -> dict[str, nn.Linear]:
    """Linears to quantize by name, in order of evaluation."""
    if architecture is None:
        left_out = None if recipe.quantize_head else model.get_output_embeddings()
        return {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not left_out
        }
    linears = dict(architecture.named_linears())
    if recipe.quantize_head:
        linears[HEAD] = architecture.head
    return linears


def _check_linear(name: str, linear: nn.Linear) -> None:
    weight = linear.weight
    if isinstance(weight, NestedQuantTensor):
        raise ValueError(f"model: {name} is nested already")
    if type(weight) is not nn.Parameter:
        raise ValueError(f"model: {name}.weight must be dense, got {type(weight).__name__}")
    if weight.is_meta:
        raise ValueError(f"model: {name}.weight is on the meta device; load the weights first")
    check_weight(weight, f"model: {name}.weight")


def _rotate(model: nn.Module, architecture: Architecture, kind: str, seed: int) -> list[str]:
    """Rotate what can be rotated; returns what a user should know."""
    notes = []
    if kind != "none":
        if not architecture.rotatable:
            notes.append(f"the residual stream is not rotated: {architecture.reason}")
        rotate_(model, Rotation.random(architecture, seed, kind, r1=architecture.rotatable))  # type: ignore[arg-type]
    if architecture.tied:
        untie_(model)
    return notes


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _quantize_w8a8(model: PreTrainedModel, recipe: W8A8Recipe) -> QuantizationReport:
    """Rotate, then let torchao round to 8 bits: per row for weights, per token for activations."""
    architecture = describe(model)
    linears = _linears(model, architecture, recipe)
    for name, linear in linears.items():
        _check_linear(name, linear)
    seconds: dict[str, float] = {}
    with _timed(seconds, "rotation"):
        notes = _rotate(model, architecture, recipe.rotation, recipe.seed)
    with _timed(seconds, "rounding"):
        torchao_quantize_(
            model, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda _, n: n in linears
        )
    return QuantizationReport((), 0, seconds, notes)


@register_quantize_module_handler(NestedRecipe)
def _nest_module(module: nn.Module, config: NestedRecipe) -> nn.Module:
    """What ``torchao.quantization.quantize_`` calls: one linear, rounded to nearest."""
    if not isinstance(module, nn.Linear):
        raise TypeError(f"bitnest_w4w8() nests nn.Linear only, got {type(module).__name__}")
    if config.tuning_steps:
        raise ValueError("tuning_steps needs the whole model and calibration: use nestq.quantize_")
    _check_linear("weight", module)
    nester = Nester(config)
    nester.round_to_nearest("module", module)
    install({"module": module}, nester.codes, config)
    return module
