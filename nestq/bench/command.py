"""The command ``nestq bench``."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from tqdm import tqdm

from nestq.argument_checks import usable_device
from nestq.bench.energy import EnergyMeter
from nestq.bench.measure import SYSTEMS, cases
from nestq.bench.models import Compiler, Source
from nestq.bench.plot import check_plot, write_plot
from nestq.bench.report import Results, environment, tables
from nestq.bench.runner import Plan, measure_source
from nestq.bench.shapes import SHAPES
from nestq.bench.timing import bandwidth
from nestq.command_line import (
    above_zero,
    add_command,
    check_output,
    not_negative,
    positive,
    share,
    write_json,
)
from nestq.kv_policy import KVPolicy
from nestq.speculative.requests import check_gamma


def add_bench(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    command = add_command(
        commands,
        "bench",
        run,
        "Measure decoding speed: speculative, its target and draft alone, and 16-bit.",
        "nestq bench llama-3-8b --synthetic-acceptance 0.952 --device cuda --json speed.json",
    )
    command.add_argument(
        "models",
        nargs="+",
        metavar="model",
        help=f"nested checkpoint (hub id or folder), or a shape with random weights: "
        f"{', '.join(SHAPES)}",
    )
    command.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        help="default: all",
    )
    command.add_argument(
        "--contexts", nargs="+", type=positive, default=[2048], help="default: 2048"
    )
    command.add_argument("--gammas", nargs="+", type=positive, default=[4], help="default: 4")
    command.add_argument(
        "--kv",
        nargs="+",
        default=["kv8/kv8", "kv4/kv8"],
        help="kv8/kv8, kv4/kv8, recent(n) or auto(n); default: the first two",
    )
    command.add_argument("--batch", nargs="+", type=positive, default=[1], help="default: 1")
    command.add_argument(
        "--rounds", type=positive, default=50, help="timed calls of each step; default: %(default)s"
    )
    command.add_argument(
        "--synthetic-acceptance",
        type=share,
        metavar="SHARE",
        help="draw which draft tokens are accepted, so that this share of them is. Without it, a "
        "checkpoint answers prompts, and a shape has no tokens/s",
    )
    command.add_argument(
        "--new-tokens",
        type=positive,
        default=2048,
        help="tokens to generate for a checkpoint's acceptance; default: %(default)s",
    )
    command.add_argument(
        "--prefill-tokens",
        type=not_negative,
        default=2048,
        help="length of the prompt that is timed; 0 for none; default: %(default)s",
    )
    command.add_argument(
        "--compiler",
        choices=get_args(Compiler),
        help="of the nested model: passes (the default on a GPU, as decoding does by itself), "
        "inductor, which takes minutes, or none (the default on a CPU). The 16-bit model is "
        "compiled by Inductor unless this is none",
    )
    command.add_argument(
        "--bandwidth",
        type=above_zero,
        help="of the memory, TB/s; default: what is known of the GPU, else it is measured",
    )
    command.add_argument("--device", default="cpu", help="default: %(default)s")
    command.add_argument("--json", type=Path, help="write all numbers to this file")
    command.add_argument("--plot", type=Path, help="draw them into this file, such as speed.png")


def run(options: argparse.Namespace, console: Console) -> None:
    """Check all arguments, measure, print; files are written after each measurement."""
    device = usable_device(options.device)
    for gamma in options.gammas:
        check_gamma(gamma)
    for policy in options.kv:
        parsed = KVPolicy.parse(policy)
        if parsed.kind in ("quantspec", "dense") or parsed.sparse is not None:
            raise ValueError(
                f"--kv must be a policy of nested planes without sparse drafts here, got {policy}"
            )
    if options.json:
        check_output("--json", options.json)
    if options.plot:
        check_output("--plot", options.plot)
        check_plot(options.plot)
    sources = [Source(name) for name in dict.fromkeys(options.models)]
    compiler: Compiler = options.compiler or ("passes" if device.type == "cuda" else "none")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        energy = EnergyMeter(device)
        known = (options.bandwidth, "given") if options.bandwidth else bandwidth(device)
        made_by = environment(
            options.command_line,
            device,
            compiler=compiler,
            rounds=options.rounds,
            bandwidth_is=known[1],
            energy=energy.obstacle or "NVML",
        )
        results = Results(made_by, known[0])
        plan = Plan(
            cases(options.systems, options.contexts, options.batch, options.gammas, options.kv),
            rounds=options.rounds,
            synthetic_acceptance=options.synthetic_acceptance,
            new_tokens=options.new_tokens,
            prefill_tokens=options.prefill_tokens,
            compiler=compiler,
        )
        total = len(sources) * plan.steps
        with tqdm(total=total, desc="bench", unit="case", file=sys.stderr) as bar:
            for source in sources:
                for _ in measure_source(source, plan, device, energy, results):
                    if options.json:
                        write_json(options.json, results.to_dict())
                    bar.update()
    if options.plot:
        write_plot(options.plot, results)
    for table in tables(results):
        console.print(table)
    if energy.obstacle:
        console.print(f"J/token is not known: {energy.obstacle}")
