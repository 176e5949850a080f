"""The command ``nestq ablate``."""

import argparse
from typing import Any

from rich.console import Console

from nestq.argument_checks import usable_device
from nestq.command_line import add_command, fetch, positive
from nestq.compare.ablations import ABLATIONS, GAMMAS, ablation, ablation_tables, described
from nestq.compare.command import measure_all
from nestq.compare.options import (
    add_shared_options,
    check_shared_options,
    is_quantized,
    is_shape,
    origin,
    plan_of,
    settings_of,
    subject_of,
)
from nestq.compare.results import Results
from nestq.pretrained import read_nested_config
from nestq.speculative.requests import check_gamma

WEIGHTS_NAME = "bitnest"


def add_ablate(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    command = add_command(
        commands,
        "ablate",
        ablate,
        "The BitNest paper's ablations of any model: draft tokens a round (table 9), what drafts "
        "read of the KV cache (table 10), what the target reads of it (table 11).",
        "nestq ablate nested draft-kv --contexts 1024 4096\n"
        "  nestq ablate smollm2-135m gamma --gammas 2 4 8 --json gamma.json",
    )
    command.add_argument(
        "model",
        help="nested checkpoint, or a 16-bit model, which is nested first; or, with --speed, a "
        "shape with random weights, such as llama-2-7b (MHA) or qwen2.5-7b (GQA)",
    )
    command.add_argument("ablation", choices=ABLATIONS)
    command.add_argument(
        "--gammas",
        nargs="+",
        type=positive,
        default=list(GAMMAS),
        help=f"of the ablation gamma; default: {' '.join(map(str, GAMMAS))}",
    )
    command.add_argument(
        "--gamma", type=positive, default=4, help="of the others; default: %(default)s"
    )
    add_shared_options(command, contexts=1024)


def ablate(options: argparse.Namespace, console: Console) -> None:
    """Check all arguments, measure, print."""
    check_gamma(options.gamma)
    contenders = ablation(options.ablation, options.gammas, WEIGHTS_NAME)
    check_shared_options(options, contenders)
    nested = not is_shape(options.model) and is_quantized(options.model)
    if nested:
        fetch(read_nested_config, options.model)
    subject = subject_of(options, {})
    if nested:
        subject.made[WEIGHTS_NAME] = subject.model
    settings = settings_of(options) | {"gamma": options.gamma, "gammas": options.gammas}
    made = origin(options, subject.model) | described(options.ablation)
    results = Results(made, settings)
    plan = plan_of(options, contenders, options.gamma, usable_device(options.device))
    measure_all(f"ablate {options.ablation}", subject, plan, results, options.json)
    config = subject.model.config.get_text_config(decoder=True)
    for table in ablation_tables(options.ablation, results, config):
        console.print(table)
