"""``quantize_``: quantize the linears of a model in place."""

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

from nestq.architectures import Architecture, describe, unwrap
from nestq.argument_checks import check_int, check_type, usable_device
from nestq.calibration import (
    LayerInputs,
    Process,
    calibration_windows,
    evaluation_mode,
    sweep_layers,
)
from nestq.four_bit_nesting import FourBitNester, input_rotations
from nestq.four_bit_recipe import FourBitRecipe
from nestq.hf_quantizer import attach, refuse_compiled_parts
from nestq.key_channels import measure_key_channels
from nestq.nesting import Nester, install
from nestq.quantizable import check_linear, dense_linears, known_architecture
from nestq.recipes import NestedRecipe, W8A8Recipe
from nestq.report import QuantizationReport
from nestq.rotation import Rotation, rotate_, untie_
from nestq.skipping_recipe import SkippingRecipe, apply_skipping_recipe, check_skipping_recipe
from nestq.tuning import tune_base

# Tokens that the Hessians are made from, at most: in trials more than this hardly changed
# acceptance, and the inputs of a layer are on the device for all of them. Tuning uses all of the
# calibration.
HESSIAN_TOKENS = 1 << 18

UNCALIBRATED = (
    "no calibration was given: weights are rounded to nearest and refined in closed form, and the "
    "draft will be accepted far less often than with calibration=texts"
)
UNCALIBRATED_FOUR_BIT = (
    "no calibration was given: weights are rounded to nearest, with far larger errors than with "
    "calibration=texts"
)


def quantize_(
    model: nn.Module,
    recipe: NestedRecipe | FourBitRecipe | W8A8Recipe | SkippingRecipe,
    *,
    calibration: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    calibration_length: int = 512,
    batch_size: int = 8,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Quantize the linears of a Hugging Face causal LM in place.

    The model is rotated (R1, R2), its linears are quantized layer by layer on calibration text,
    and their weights become :class:`NestedQuantTensor` or, with a recipe of one 4-bit weight,
    :class:`FourBitTensor`. Embedding rows keep their dtype; a head
    that is nested or rotated is untied from them. Calibration is in evaluation mode, whatever mode
    the model is in. Weights are replaced after the last one is ready: if anything fails before,
    the model still computes its own function, though it may be rotated. Of a multimodal model the
    language model alone is nested, and only with ``rotation="none"`` and without calibration.

    Args:
        model: a causal LM; ``torch.compile`` it afterwards, not before.
        recipe: ``bitnest_w4w8()``, ``quantspec_w4w16()`` or ``qspec_w4()``; or a plain reference,
            ``w4a8()``, ``w4a16()`` or ``w8a8()``, the last of which takes no other argument than
            ``progress``. So does ``quantspec_w4w16(weights=False)``. ``draft_and_verify()`` comes
            on top of any of the first, or leaves weights as they are.
        calibration: texts, chats, token ids or a ``datasets`` dataset (see
            ``nestq.calibration.calibration_windows``). None rounds to nearest, with a warning.
            Hessians are made from the first ``HESSIAN_TOKENS`` tokens.
        tokenizer: for calibration texts.
        calibration_length: tokens in a calibration row, at most.
        batch_size: calibration rows that go through a layer at once.
        device: where layers are quantized, one at a time; default: where the model is.
        progress: show progress bars.

    Returns:
        A report with one entry a quantized linear: none for ``w8a8()``.

    Raises:
        TypeError, ValueError: an argument is off; the model is unchanged (rotated, at most, where
            scales overflow ``scale_dtype``).
        UnsupportedArchitectureError: the model's structure is unknown, and the recipe needs it.
        CalibrationError: calibration met NaN, infinity or a singular layer.
    """
    model = check_type("model", unwrap(model), PreTrainedModel, "a transformers PreTrainedModel")
    if isinstance(recipe, W8A8Recipe):
        _refuse_arguments(
            "w8a8(), which rounds to nearest where the model is",
            calibration=calibration,
            tokenizer=tokenizer,
            calibration_length=calibration_length,
            batch_size=batch_size,
            device=device,
        )
        return _quantize_w8a8(model, recipe)
    if isinstance(recipe, SkippingRecipe):
        options: dict[str, Any] = {
            "calibration": calibration,
            "tokenizer": tokenizer,
            "calibration_length": calibration_length,
            "batch_size": batch_size,
            "device": device,
            "progress": progress,
        }
        return _skip_layers(model, recipe, **options)
    _check_arguments(recipe, calibration, tokenizer, calibration_length, batch_size)
    where = None if device is None else usable_device(device)
    refuse_compiled_parts(name for name, _ in model.named_modules())
    if isinstance(recipe, FourBitRecipe) and not recipe.weights:
        _refuse_arguments(
            f"{recipe.name}(weights=False), which quantizes no weight",
            calibration=calibration,
            tokenizer=tokenizer,
            calibration_length=calibration_length,
            batch_size=batch_size,
            device=device,
        )
        return _store_policy(model, recipe)
    architecture = known_architecture(model, recipe, needed=calibration is not None)
    linears = dense_linears(model, architecture, recipe)
    windows = None
    if calibration is None:
        if isinstance(recipe, NestedRecipe):
            recipe = replace(recipe, refinement="closed_form")
    else:
        windows = _windows(model, calibration, tokenizer, calibration_length)
    nester = _nester(recipe, architecture)
    uncalibrated = UNCALIBRATED if isinstance(recipe, NestedRecipe) else UNCALIBRATED_FOUR_BIT
    if windows is None:
        warnings.warn(uncalibrated, stacklevel=2)

    seconds: dict[str, float] = {}
    notes: list[str] = []
    losses: list[float] = []
    hessian_tokens = 0
    rotate_keys = None
    if architecture is not None:
        with _timed(seconds, "rotation"):
            notes += _rotate(model, architecture, recipe)
    if windows is None:
        notes.append(uncalibrated)
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
            with _timed(seconds, "key channels"):
                keys = measure_key_channels(architecture, windows, batch_size, compute)
            rotate_keys = keys.need_rotation
            notes += keys.notes()
            losses = _calibrate(
                architecture, nester, windows, observed, batch_size, compute, progress, seconds
            )

    _install(nester, linears)
    report = QuantizationReport(
        linears=nester.reports,
        calibration_tokens=0 if windows is None else windows.numel(),
        hessian_tokens=hessian_tokens,
        seconds=seconds,
        notes=notes,
        tuning_loss=losses,
    )
    attach(model, recipe.to_dict(), report.to_dict(), recipe.kv, rotate_keys)
    return report


def _check_arguments(
    recipe: NestedRecipe | FourBitRecipe,
    calibration: Any,
    tokenizer: object,
    calibration_length: object,
    batch_size: object,
) -> None:
    if not isinstance(recipe, FourBitRecipe):
        check_type("recipe", recipe, NestedRecipe, "bitnest_w4w8() or another of nestq's recipes")
    if tokenizer is not None:
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a transformers tokenizer")
    check_int("calibration_length", calibration_length, 1)
    check_int("batch_size", batch_size, 1)
    if isinstance(recipe, NestedRecipe) and recipe.tuning_steps and calibration is None:
        raise ValueError("recipe: tuning_steps needs calibration=, got None")


def _refuse_arguments(ignored_by: str, **arguments: Any) -> None:
    """Refuse all but the defaults of :func:`quantize_`, for a recipe that ignores them."""
    defaults: Any = quantize_.__kwdefaults__
    for name, value in arguments.items():
        default = defaults[name]
        # The types first: comparing a tensor gives a tensor.
        if type(value) is not type(default) or value != default:
            raise ValueError(
                f"{name} does not apply to {ignored_by}: "
                f"expected {default!r}, got {short_repr(value)}"
            )


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


def _cap_notes(
    observed: Tensor, windows: Tensor, recipe: NestedRecipe | FourBitRecipe
) -> list[str]:
    if len(observed) == len(windows):
        return []
    tunes = isinstance(recipe, NestedRecipe) and recipe.tuning_steps > 0
    rest = "tuning used all" if tunes else "the rest was not used"
    return [
        f"Hessians were made from the first {observed.numel()} of {windows.numel()} calibration "
        f"tokens, as more hardly change acceptance; {rest}"
    ]


def _rotate(
    model: nn.Module,
    architecture: Architecture,
    recipe: NestedRecipe | FourBitRecipe | W8A8Recipe,
) -> list[str]:
    """Apply R1 and R2, or R2 alone where R1 cannot be; returns what a user should know."""
    if recipe.rotation == "none":
        return []
    r1 = architecture.rotatable
    rotate_(model, Rotation.random(architecture, recipe.seed, recipe.rotation, r1=r1))
    return [] if r1 else [f"the residual stream is not rotated: {architecture.reason}"]


def _nester(
    recipe: NestedRecipe | FourBitRecipe, architecture: Architecture | None
) -> Nester | FourBitNester:
    if isinstance(recipe, NestedRecipe):
        return Nester(recipe)
    return FourBitNester(recipe, input_rotations(recipe, architecture))


def _install(nester: Nester | FourBitNester, linears: dict[str, nn.Linear]) -> None:
    if isinstance(nester, FourBitNester):
        nester.install(linears)
    else:
        install(linears, nester.codes, nester.recipe)


def _calibrate(
    architecture: Architecture,
    nester: Nester | FourBitNester,
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
                activation_bits=bits,
            )

    bits = 8
    if isinstance(nester, FourBitNester):
        bits = nester.recipe.calibration_bits
        sweep(nester.base, "base")
        return []
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
    linears = dense_linears(model, architecture, recipe)
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


def _skip_layers(
    model: PreTrainedModel, recipe: SkippingRecipe, **options: Any
) -> QuantizationReport:
    """Quantize the weights if the recipe says so, and skip layers of the draft after that."""
    search = {name: options[name] for name in ("calibration", "tokenizer", "batch_size")}
    if recipe.weights is None:
        rest = {name: options[name] for name in ("calibration_length", "device")}
        ignored = rest if recipe.searches else {**rest, **search}
        _refuse_arguments("draft_and_verify() without weights= that need it", **ignored)
    check_skipping_recipe(model, recipe, **search)
    report = None if recipe.weights is None else quantize_(model, recipe.weights, **options)
    return apply_skipping_recipe(model, recipe, report, **search, progress=options["progress"])


def _store_policy(model: PreTrainedModel, recipe: FourBitRecipe) -> QuantizationReport:
    """Leave the weights, and have the recipe's KV policy as the model's default."""
    report = QuantizationReport((), 0, 0, {})
    attach(model, recipe=recipe.to_dict(), report=report.to_dict(), kv=recipe.kv)
    return report


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
    check_linear("linear", module)
    done = replace(config, rotation="none", refinement="closed_form", kv="kv8/kv8")
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
