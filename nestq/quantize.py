"""``quantize_``: nest the linears of a model in place."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from reprlib import repr as short_repr
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.transform_module import register_quantize_module_handler
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from nestq.architectures import (
    HEAD,
    Architecture,
    UnsupportedArchitectureError,
    describe,
    unwrap,
)
from nestq.argument_checks import check_int, check_type, usable_device
from nestq.calibration import (
    LayerInputs,
    Process,
    calibration_windows,
    evaluation_mode,
    sweep_layers,
)
from nestq.hf_quantizer import attach, refuse_compiled_parts
from nestq.nesting import Nester, install
from nestq.recipes import NestedRecipe, W8A8Recipe
from nestq.report import QuantizationReport
from nestq.rotation import Rotation, rotate_, untie_
from nestq.tensor import NestedQuantTensor
from nestq.tensor_checks import check_weight
from nestq.tuning import tune_base

# Tokens that the Hessians are made from, at most: in trials more than this hardly changed
# acceptance, and the inputs of a layer are on the device for all of them. Tuning uses all of the
# calibration.
HESSIAN_TOKENS = 1 << 18

UNCALIBRATED = (
    "no calibration was given: weights are rounded to nearest and refined in closed form, and the "
    "draft will be accepted far less often than with calibration=texts"
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
    and their weights become :class:`NestedQuantTensor`. Embedding rows keep their dtype; a head
    that is nested or rotated is untied from them. Calibration is in evaluation mode, whatever mode
    the model is in. Weights are replaced after the last one is ready: if anything fails before,
    the model still computes its own function, though it may be rotated. Of a multimodal model the
    language model alone is nested, and only with ``rotation="none"`` and without calibration.

    Args:
        model: a causal LM; ``torch.compile`` it afterwards, not before.
        recipe: ``bitnest_w4w8()``, or ``w8a8()`` for the plain reference, which takes no other
            argument than ``progress``.
        calibration: texts, chats, token ids or a ``datasets`` dataset (see
            ``nestq.calibration.calibration_windows``). None rounds to nearest, with a warning.
            Hessians are made from the first ``HESSIAN_TOKENS`` tokens.
        tokenizer: for calibration texts.
        calibration_length: tokens in a calibration row, at most.
        batch_size: calibration rows that go through a layer at once.
        device: where layers are quantized, one at a time; default: where the model is.
        progress: show progress bars.

    Returns:
        A report with one entry a nested linear: none for ``w8a8()``.

    Raises:
        TypeError, ValueError: an argument is off; the model is unchanged (rotated, at most, where
            scales overflow ``scale_dtype``).
        UnsupportedArchitectureError: the model's structure is unknown, and the recipe needs it.
        CalibrationError: calibration met NaN, infinity or a singular layer.
    """
    model = check_type("model", unwrap(model), PreTrainedModel, "a transformers PreTrainedModel")
    if isinstance(recipe, W8A8Recipe):
        _refuse_what_w8a8_ignores(
            calibration=calibration,
            tokenizer=tokenizer,
            calibration_length=calibration_length,
            batch_size=batch_size,
            device=device,
        )
        return _quantize_w8a8(model, recipe)
    _check_arguments(recipe, calibration, tokenizer, calibration_length, batch_size)
    where = None if device is None else usable_device(device)
    refuse_compiled_parts(name for name, _ in model.named_modules())
    architecture = _architecture(model, recipe, needed=calibration is not None)
    linears = _dense_linears(model, architecture, recipe)
    windows = None
    if calibration is None:
        warnings.warn(UNCALIBRATED, stacklevel=2)
        recipe = replace(recipe, refinement="closed_form")
    else:
        windows = _windows(model, calibration, tokenizer, calibration_length)

    seconds: dict[str, float] = {}
    notes: list[str] = []
    losses: list[float] = []
    hessian_tokens = 0
    if architecture is not None:
        with _timed(seconds, "rotation"):
            notes += _rotate(model, architecture, recipe)
    nester = Nester(recipe)
    if windows is None:
        notes.append(UNCALIBRATED)
        with _timed(seconds, "rounding"):
            for name, linear in tqdm(linears.items(), desc="round", disable=not progress):
                nester.round_to_nearest(name, linear, where)
    else:
        assert architecture is not None
        observed = windows[: max(1, HESSIAN_TOKENS // windows.shape[1])]
        hessian_tokens = observed.numel()
        notes += _cap_notes(observed, windows, recipe)
        compute = where or architecture.embedding.weight.device
        with evaluation_mode(model):
            losses = _calibrate(
                architecture, nester, windows, observed, batch_size, compute, progress, seconds
            )

    install(linears, nester.codes, recipe)
    report = QuantizationReport(
        linears=nester.reports,
        calibration_tokens=0 if windows is None else windows.numel(),
        hessian_tokens=hessian_tokens,
        seconds=seconds,
        notes=notes,
        tuning_loss=losses,
    )
    attach(model, recipe=recipe.to_dict(), report=report.to_dict())
    return report


def _check_arguments(
    recipe: NestedRecipe,
    calibration: Any,
    tokenizer: object,
    calibration_length: object,
    batch_size: object,
) -> None:
    check_type("recipe", recipe, NestedRecipe, "bitnest_w4w8() or w8a8()")
    if tokenizer is not None:
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a transformers tokenizer")
    check_int("calibration_length", calibration_length, 1)
    check_int("batch_size", batch_size, 1)
    if recipe.tuning_steps and calibration is None:
        raise ValueError("recipe: tuning_steps needs calibration=, got None")


def _refuse_what_w8a8_ignores(**arguments: Any) -> None:
    """Refuse all but the defaults of :func:`quantize_`."""
    defaults: Any = quantize_.__kwdefaults__
    for name, value in arguments.items():
        default = defaults[name]
        # The types first: comparing a tensor gives a tensor.
        if type(value) is not type(default) or value != default:
            raise ValueError(
                f"{name} does not apply to w8a8(), which rounds to nearest where the model is: "
                f"expected {default!r}, got {short_repr(value)}"
            )


def _architecture(model: nn.Module, recipe: NestedRecipe, needed: bool) -> Architecture | None:
    """The model's parts; None if they are unknown and neither rotation nor GPTQ needs them."""
    try:
        return describe(model)
    except UnsupportedArchitectureError:
        if needed or recipe.rotation != "none":
            raise
        return None


def _dense_linears(
    model: PreTrainedModel, architecture: Architecture | None, recipe: NestedRecipe | W8A8Recipe
) -> dict[str, nn.Linear]:
    """Linears to quantize by name, in order of evaluation; each can be quantized."""
    if architecture is None:
        _refuse_conv1d(model)
        parts = _language_model(model)
        head: Any = model.get_output_embeddings()
        (parts.add if recipe.quantize_head else parts.discard)(head)
        linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module in parts
        }
    else:
        linears = dict(architecture.named_linears())
        if recipe.quantize_head:
            linears[HEAD] = architecture.head
    for name, linear in linears.items():
        _check_linear(name, linear)
    return linears


def _language_model(model: PreTrainedModel) -> set[nn.Module]:
    """Modules of the language model: without the towers and projectors of a multimodal one."""
    config = model.config
    is_multimodal = config.get_text_config(decoder=True) is not config
    return set((model.get_decoder() if is_multimodal else model).modules())


def _refuse_conv1d(model: nn.Module) -> None:
    """GPT-2 keeps its weights in these, transposed: all but the head would be left dense."""
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise UnsupportedArchitectureError(
                f"model: {name} of {type(model).__name__} is a transformers Conv1D, and only "
                "nn.Linear can be nested"
            )


def _check_linear(name: str, linear: nn.Linear) -> None:
    weight = linear.weight
    if isinstance(weight, NestedQuantTensor):
        raise ValueError(f"model: {name} is nested already")
    if type(weight) is not nn.Parameter:
        raise ValueError(f"model: {name}.weight must be dense, got {type(weight).__name__}")
    if weight.is_meta:
        raise ValueError(f"model: {name}.weight is on the meta device; load the weights first")
    check_weight(weight, f"model: {name}.weight")


def _windows(
    model: PreTrainedModel,
    calibration: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration_length: int,
) -> Tensor:
    """Calibration rows ``[n, length]`` that fit the model's context."""
    config: Any = model.config
    limit = getattr(config, "max_position_embeddings", calibration_length)
    return calibration_windows(
        calibration, tokenizer, config.vocab_size, min(calibration_length, limit)
    )


def _cap_notes(observed: Tensor, windows: Tensor, recipe: NestedRecipe) -> list[str]:
    if len(observed) == len(windows):
        return []
    rest = "tuning used all" if recipe.tuning_steps else "the rest was not used"
    return [
        f"Hessians were made from the first {observed.numel()} of {windows.numel()} calibration "
        f"tokens, as more hardly change acceptance; {rest}"
    ]


def _rotate(
    model: nn.Module, architecture: Architecture, recipe: NestedRecipe | W8A8Recipe
) -> list[str]:
    """Apply R1 and R2, or R2 alone where R1 cannot be; returns what a user should know."""
    if recipe.rotation == "none":
        return []
    r1 = architecture.rotatable
    rotate_(model, Rotation.random(architecture, recipe.seed, recipe.rotation, r1=r1))
    return [] if r1 else [f"the residual stream is not rotated: {architecture.reason}"]


def _calibrate(
    architecture: Architecture,
    nester: Nester,
    windows: Tensor,
    observed: Tensor,
    batch_size: int,
    device: torch.device,
    progress: bool,
    seconds: dict[str, float],
) -> list[float]:
    """Make the codes of all linears by GPTQ, with tuning between base and refinement if asked for.

    Args:
        architecture: of the rotated model.
        nester: takes up the codes.
        windows: token ids ``[n, length]`` to tune on.
        observed: those of them that Hessians are made from.
        batch_size: rows that go through at once.
        device: where to.
        progress: show progress bars.
        seconds: takes up the wall time of each stage.

    Returns:
        The loss of each tuning step.
    """

    def sweep(process: Process, stage: str) -> None:
        with _timed(seconds, stage):
            sweep_layers(
                architecture,
                LayerInputs(architecture, observed, batch_size, device),
                process,
                with_head=nester.recipe.quantize_head,
                description=stage,
                progress=progress,
            )

    if not nester.recipe.tuning_steps:
        sweep(nester.base_and_refinement, "base and refinement")
        return []
    sweep(nester.base, "base")
    with _timed(seconds, "tuning"):
        losses = tune_base(
            architecture, nester.codes, windows, nester.recipe, device, batch_size, progress
        )
    sweep(nester.refinement, "refinement")
    return losses


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _quantize_w8a8(model: PreTrainedModel, recipe: W8A8Recipe) -> QuantizationReport:
    """Rotate, then let torchao round to 8 bits: per row for weights, per token for activations."""
    architecture = describe(model)
    linears = _dense_linears(model, architecture, recipe)
    seconds: dict[str, float] = {}
    with _timed(seconds, "rotation"):
        notes = _rotate(model, architecture, recipe)
    if recipe.quantize_head:
        untie_(model)
    with _timed(seconds, "rounding"):
        torchao_quantize_(
            model, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda _, n: n in linears
        )
    return QuantizationReport((), 0, 0, seconds, notes)


@register_quantize_module_handler(NestedRecipe)
def _nest_module(module: nn.Module, config: NestedRecipe) -> nn.Module:
    """What ``torchao.quantization.quantize_`` calls: nest one linear, rounded to nearest.

    It knows nothing of the model. So nothing is rotated or calibrated, which a warning says (given
    for each linear; Python shows it once), the head is nested like any linear unless ``filter_fn``
    leaves it out, and nothing tells transformers how to save the model: ``nestq.save`` does all
    that is needed, ``model.save_pretrained`` alone fails.

    Raises:
        TypeError: the module is no linear.
        ValueError: an option needs the whole model, or the weight cannot be nested.
    """
    if not isinstance(module, nn.Linear):
        raise TypeError(f"bitnest_w4w8() nests nn.Linear only, got {type(module).__name__}")
    if config.tuning_steps:
        raise ValueError("tuning_steps needs the whole model and calibration: use nestq.quantize_")
    if not config.quantize_head:
        raise ValueError(
            "quantize_head=False needs the whole model, to tell its head from other linears: use "
            "nestq.quantize_, or leave the head out by filter_fn"
        )
    _check_linear("linear", module)
    done = replace(config, rotation="none", refinement="closed_form")
    ignored = [
        f"{name}={value!r}"
        for name, value in asdict(config).items()
        if name == "damping" or value != getattr(done, name)
    ]
    warnings.warn(
        "torchao's quantize_ shows one linear at a time: weights are rounded to nearest and "
        f"refined in closed form. Not applied: {', '.join(ignored)}. "
        "nestq.quantize_(model, recipe, calibration=texts) applies all and drafts far better. "
        "Save the model with nestq.save: model.save_pretrained cannot",
        stacklevel=2,
    )
    nester = Nester(done)
    nester.round_to_nearest("linear", module)
    install({"linear": module}, nester.codes, done)
    return module
