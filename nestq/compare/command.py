"""The command ``nestq compare``."""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from nestq.argument_checks import usable_device
from nestq.command_line import add_command, positive, write_json
from nestq.compare.contenders import CONTENDERS, WEIGHTS, Contender, chosen
from nestq.compare.options import (
    add_shared_options,
    check_shared_options,
    checked_checkpoints,
    is_quantized,
    is_shape,
    origin,
    plan_of,
    settings_of,
    subject_of,
)
from nestq.compare.plot import write_plot
from nestq.compare.results import Results, left_behind
from nestq.compare.runner import Plan, Subject, run
from nestq.compare.table import comparison_tables
from nestq.speculative.requests import check_gamma

DESCRIPTION = (
    "Compare ways to draft on one model and one set of prompts: acceptance, perplexity of the "
    "target, memory and bytes read; with --speed tokens/s."
)
DURATION = (
    "SmolLM2-135M on one core, with the defaults and all recipes: about HOURS. Most of it is "
    "quantizing, which --checkpoint saves and --recipes narrows down. Results are written after "
    "each recipe: --resume goes on with a run that was stopped."
)


def add_compare(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    command = add_command(
        commands,
        "compare",
        compare,
        DESCRIPTION,
        "nestq compare smollm2-135m --json compare.json --plot compare.png\n"
        "  nestq compare smollm2-135m --recipes bitnest-kv4 quantspec --contexts 1024 4096\n"
        "  nestq compare llama-3-8b --speed --synthetic-acceptance 0.9 --device cuda\n\n"
        f"{DURATION}",
    )
    command.add_argument(
        "model",
        help="16-bit model: hub id, folder, .gguf file or smollm2-135m; or, with --speed, "
        "a shape with random weights, such as llama-3-8b",
    )
    command.add_argument(
        "--recipes",
        nargs="+",
        metavar="RECIPE",
        help=f"of {', '.join(CONTENDERS)}; 16-bit is always there; default: all",
    )
    command.add_argument("--gamma", type=positive, default=4, help="default: %(default)s")
    command.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="take quantized weights from a folder or hub id, instead of quantizing; NAME is "
        "bitnest, quantspec, qspec, w4a8 or w4a16",
    )
    add_shared_options(command, contexts=1024)
    command.add_argument("--plot", type=Path, help="draw acceptance against bytes into this file")
    command.add_argument(
        "--resume",
        action="store_true",
        help="keep what the --json file of a stopped run with the same options has",
    )


def compare(options: argparse.Namespace, console: Console) -> None:
    """Check all arguments, measure, print."""
    check_gamma(options.gamma)
    contenders = _contenders(options)
    check_shared_options(options, contenders)
    if options.resume and options.json is None:
        raise ValueError("--resume needs --json, the file to go on with")
    checkpoints = checked_checkpoints(options.checkpoint)
    settings = settings_of(options) | {"gamma": options.gamma, "checkpoints": checkpoints}
    done = left_behind(options.json, settings) if options.resume else []
    if not is_shape(options.model) and is_quantized(options.model):
        raise ValueError(
            f"{options.model}: the model is quantized already, expected one of 16 bits"
        )
    subject = subject_of(options, checkpoints)
    results = Results(origin(options, subject.model), settings, done)
    plan = plan_of(options, contenders, options.gamma, usable_device(options.device))
    measure_all("compare", subject, plan, results, options.json)
    if options.plot:
        write_plot(options.plot, results, options.model)
    for table in comparison_tables(results):
        console.print(table)


def _contenders(options: argparse.Namespace) -> list[Contender]:
    """Those that are asked for, or all that the model and the calibration allow."""
    contenders = chosen(options.recipes)
    if options.recipes is None and is_shape(options.model):
        return [one for one in contenders if not one.skips and WEIGHTS[one.weights].has_views]
    if options.recipes is None and options.calibration == "none":
        return [one for one in contenders if not one.skips]
    return contenders


def measure_all(
    name: str, subject: Subject, plan: Plan, results: Results, path: Path | None
) -> None:
    """Measure what is missing, with a progress bar; a file is written after each result.

    Args:
        name: of the command.
        subject: the model.
        plan: what is measured.
        results: takes up what is measured.
        path: of the file; None for none.
    """
    missing = sum(
        not results.has(one.name, context) for one in plan.contenders for context in plan.contexts
    )
    with tqdm(total=missing, desc=name, unit="result", file=sys.stderr) as bar:
        for step in run(subject, plan, results):
            if step:
                bar.set_description(f"{name} {step}")
                continue
            bar.update()
            if path:
                write_json(path, results.to_dict())
        bar.set_description(name)
