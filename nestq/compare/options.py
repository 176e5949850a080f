"""What ``nestq compare`` and ``nestq ablate`` are both asked for, checked before work is done."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from nestq.argument_checks import usable_device
from nestq.bench.energy import EnergyMeter
from nestq.bench.plot import check_plot
from nestq.bench.shapes import SHAPES, merged_shape, random_dense_model, shape_config
from nestq.command_line import check_output, fetch, positive, share
from nestq.compare.contenders import WEIGHTS, Calibration, Contender
from nestq.compare.contexts import SHORTEST_CONTEXT, contexts_of, long_contexts
from nestq.compare.runner import Plan, Subject
from nestq.compare.speed import Timer
from nestq.data import calibration_tokens, load_texts, tokenize_texts
from nestq.evaluation import made_by
from nestq.pretrained import PACKAGED, load_model, read_nested_config
from nestq.speculative.requests import check_context, check_gamma

# Tokens of a calibration row, at most: many short chats calibrate better than few long ones.
CALIBRATION_LENGTH = 512
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


def add_shared_options(command: Any, contexts: int) -> None:
    """Options of both commands.

    Args:
        command: the parser of one.
        contexts: the default.
    """
    command.add_argument(
        "--contexts",
        nargs="+",
        type=positive,
        default=[contexts],
        help=f"tokens of a prompt; default: {contexts}",
    )
    command.add_argument("--prompts", type=positive, default=4, help="default: %(default)s")
    command.add_argument(
        "--new-tokens",
        type=positive,
        default=64,
        help="to generate for each prompt, at most; default: %(default)s",
    )
    command.add_argument(
        "--batch-size",
        type=positive,
        default=8,
        help="prompts that are answered at once; default: %(default)s",
    )
    command.add_argument(
        "--texts",
        metavar="FILE",
        help="prompts: pieces of a .txt, .json or .jsonl file; default: held-out chats, with a "
        "question of a chat or of HumanEval at the end",
    )
    command.add_argument(
        "--calibration",
        default="sharegpt",
        help="sharegpt, a .txt, .json or .jsonl file, or none: round to nearest, and no search for "
        "layers to skip; default: %(default)s",
    )
    command.add_argument(
        "--calibration-tokens",
        type=positive,
        default=16384,
        help="fewer than the best quantization takes, to be quick; default: %(default)s",
    )
    command.add_argument(
        "--speed",
        action="store_true",
        help="time decoding, too: tokens/s at batch 1 and the ratio to the 16-bit model",
    )
    command.add_argument(
        "--synthetic-acceptance",
        type=share,
        metavar="SHARE",
        help="of a shape with random weights: take this slot acceptance for all",
    )
    command.add_argument(
        "--rounds", type=positive, default=20, help="rounds to time; default: %(default)s"
    )
    command.add_argument("--device", default="cpu", help="default: %(default)s")
    command.add_argument("--json", type=Path, help="write all numbers to this file")


def is_shape(model: str) -> bool:
    """Whether a model is one of random weights."""
    return model in SHAPES and model != PACKAGED


def check_shared_options(options: argparse.Namespace, contenders: Sequence[Contender]) -> None:
    """Refuse what cannot be done, before anything is loaded."""
    usable_device(options.device)
    for contender in contenders:
        if contender.gamma is not None:
            check_gamma(contender.gamma)
        for context in options.contexts:
            contender.policy(context)
    for context in options.contexts:
        if context < SHORTEST_CONTEXT:
            raise ValueError(
                f"--contexts must be at least {SHORTEST_CONTEXT} tokens each, got {context}"
            )
    if options.json:
        check_output("--json", options.json)
    if getattr(options, "plot", None):
        check_output("--plot", options.plot)
        check_plot(options.plot)
    if is_shape(options.model):
        _check_shape(options, contenders)
        return
    if options.synthetic_acceptance is not None:
        raise ValueError(
            f"--synthetic-acceptance is for random weights, and {options.model} answers prompts"
        )
    for contender in contenders:
        if contender.skips and options.calibration == "none":
            raise ValueError(
                f"--calibration none: {contender.name} searches for layers to skip on calibration "
                "text"
            )
    for path in (options.texts, options.calibration):
        if path not in (None, "sharegpt", "none"):
            load_texts(path)


def _check_shape(options: argparse.Namespace, contenders: Sequence[Contender]) -> None:
    if not options.speed:
        raise ValueError(
            f"--speed is needed with {options.model}, whose weights are random and answer nothing"
        )
    for contender in contenders:
        if contender.skips or not WEIGHTS[contender.weights].has_views:
            raise ValueError(f"--recipes: {contender.name} cannot be timed with random weights")


def is_quantized(source: str) -> bool:
    """Whether a hub id or folder says that it is quantized; reads its config alone."""
    if source == PACKAGED or Path(source).suffix == ".gguf":
        return False
    config = fetch(AutoConfig.from_pretrained, source)
    return getattr(config, "quantization_config", None) is not None


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What results depend on; contexts and contenders may be added to a file."""
    names = (
        "model",
        "prompts",
        "new_tokens",
        "texts",
        "calibration",
        "calibration_tokens",
        "speed",
        "synthetic_acceptance",
        "device",
    )
    return {name: getattr(options, name) for name in names}


def subject_of(options: argparse.Namespace, checkpoints: dict[str, str]) -> Subject:
    """The model on its device, with prompts and calibration.

    Args:
        options: of the command.
        checkpoints: weights that are not to be quantized.
    """
    if is_shape(options.model):
        model = random_dense_model(shape_config(options.model), options.device)
        merged = random_dense_model(merged_shape(shape_config(options.model)), options.device)
        return Subject(model, {}, Calibration(None), made={"16-bit": merged})
    model, tokenizer = fetch(load_model, options.model)
    for folder in checkpoints.values():
        _check_sizes(model.config, folder)
    for context in options.contexts:
        check_context(model.config, context + options.new_tokens)
    prompts = {context: _prompts(options, tokenizer, context) for context in options.contexts}
    calibration = Calibration(_calibration(options, tokenizer))
    # A model without a pad token is padded with any other: the mask hides it.
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_token_id = next(token for token in pads if token is not None)
    model.to(options.device)
    return Subject(model, prompts, calibration, pad_token_id, checkpoints)


def _check_sizes(config: Any, folder: str) -> None:
    """Refuse a checkpoint of a model with other sizes."""
    other: Any = fetch(AutoConfig.from_pretrained, folder)
    for name in _SIZES:
        own, found = getattr(config, name, None), getattr(other, name, None)
        if own != found:
            raise ValueError(
                f"--checkpoint {folder}: a model with {name} {found}, expected {own} as in the "
                "model that is compared"
            )


def _prompts(options: argparse.Namespace, tokenizer: Any, context: int) -> Tensor:
    if options.texts is None:
        return long_contexts(tokenizer, options.prompts, context)
    return contexts_of(tokenizer, load_texts(options.texts), options.prompts, context)


def _calibration(options: argparse.Namespace, tokenizer: Any) -> list[list[int]] | None:
    if options.calibration == "none":
        return None
    if options.calibration == "sharegpt":
        return calibration_tokens(tokenizer, options.calibration_tokens, CALIBRATION_LENGTH)
    left, kept = options.calibration_tokens, []
    for sequence in tokenize_texts(tokenizer, load_texts(options.calibration)):
        if left > 0:
            kept.append(sequence[:left])
            left -= len(sequence)
    return kept


def plan_of(
    options: argparse.Namespace, contenders: Sequence[Contender], gamma: int, device: torch.device
) -> Plan:
    """What is to be measured."""
    timer = None
    if options.speed:
        compiler: Any = "passes" if device.type == "cuda" else "none"
        timer = Timer(options.rounds, compiler, EnergyMeter(device))
    return Plan(
        contenders=contenders,
        contexts=options.contexts,
        gamma=gamma,
        new_tokens=options.new_tokens,
        batch_size=options.batch_size,
        timer=timer,
        synthetic_acceptance=options.synthetic_acceptance,
    )


def origin(options: argparse.Namespace, model: PreTrainedModel) -> dict[str, Any]:
    """How results are made, as JSON values."""
    return made_by(options.command_line, model, model, {})


def checked_checkpoints(given: Sequence[str]) -> dict[str, str]:
    """``NAME=FOLDER`` arguments; each is a nestq checkpoint.

    Raises:
        OSError, ValueError: one is not.
    """
    found = {}
    names = [name for name, weights in WEIGHTS.items() if weights.recipe and weights.has_views]
    for text in given:
        name, sign, folder = text.partition("=")
        if not (sign and folder) or name not in names:
            raise ValueError(
                f"--checkpoint must be NAME=FOLDER with a NAME of {', '.join(names)}, got {text!r}"
            )
        fetch(read_nested_config, folder)
        found[name] = folder
    return found
