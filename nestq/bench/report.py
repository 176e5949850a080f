"""What ``nestq bench`` measured: tables and JSON."""

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

import nestq
from nestq.bench.measure import SYSTEMS, Case, Measurement
from nestq.evaluation import versions


@dataclass(frozen=True)
class Prefill:
    """Time of a prompt.

    Attributes:
        model: its name.
        weights: ``"random"`` or ``"checkpoint"``.
        system: ``"16-bit"``, or ``"w8a8"``: the target.
        tokens: of the prompt.
        milliseconds: measured.
    """

    model: str
    weights: str
    system: str
    tokens: int
    milliseconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the prompt."""
        return 1000 * self.tokens / self.milliseconds


@dataclass
class Results:
    """All measurements of a command.

    Attributes:
        environment: how they were made, as JSON values.
        bandwidth: of the memory, TB/s.
        measurements: one a case.
        prefills: one a model and system.
    """

    environment: dict[str, Any]
    bandwidth: float
    measurements: list[Measurement] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)

    def baseline(self, of: Measurement, system: str) -> Measurement | None:
        """The measurement of another system in the same situation."""
        place = (of.model, of.case.context, of.case.batch)
        for one in self.measurements:
            case = one.case
            if (one.model, case.context, case.batch, case.system) == (*place, system):
                return one
        return None

    def speedup(self, of: Measurement, system: str) -> float | None:
        """Tokens a second against another system; None if one of them is not known."""
        other = self.baseline(of, system)
        if other is None or of.tokens_per_second is None or other.tokens_per_second is None:
            return None
        return of.tokens_per_second / other.tokens_per_second

    def places(self) -> list[tuple[str, int, int]]:
        """Model, context and batch of all measurements, each once."""
        places = ((one.model, one.case.context, one.case.batch) for one in self.measurements)
        return list(dict.fromkeys(places))

    def at(self, place: tuple[str, int, int]) -> list[Measurement]:
        """The measurements of a model, context and batch, baselines first."""
        found = [
            one
            for one in self.measurements
            if (one.model, one.case.context, one.case.batch) == place
        ]
        return sorted(found, key=lambda one: SYSTEMS.index(one.case.system))

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON values."""
        return self.environment | {
            "bandwidth_terabytes_per_second": self.bandwidth,
            "measurements": [self._entry(one) for place in self.places() for one in self.at(place)],
            "prefills": [
                asdict(one) | {"tokens_per_second": one.tokens_per_second} for one in self.prefills
            ],
        }

    def _entry(self, one: Measurement) -> dict[str, Any]:
        acceptance: dict[str, Any] | None = None
        if one.acceptance is not None:
            acceptance = asdict(one.acceptance) | {
                "label": str(one.acceptance),
                "drawn_slot": one.drawn_slot_acceptance,
            }
        steps = {
            name: {
                "milliseconds": step.milliseconds,
                "bytes_read": step.bytes_read,
                "terabytes_per_second": step.terabytes_per_second,
                "share_of_bandwidth": step.terabytes_per_second / self.bandwidth,
                "floor_milliseconds": step.floor(self.bandwidth),
            }
            for name, step in one.steps().items()
        }
        return {
            "model": one.model,
            "weights": one.weights,
            **asdict(one.case),
            "acceptance": acceptance,
            "steps": steps,
            "tokens_per_round": one.tokens_per_round,
            "tokens_per_second": one.tokens_per_second,
            "speedup_over_16_bit": self.speedup(one, "16-bit"),
            "speedup_over_w8a8": self.speedup(one, "w8a8"),
            "joules_per_token": one.joules_per_token,
            "peak_bytes": one.peak_bytes,
        }


def environment(command: str, device: torch.device, **more: Any) -> dict[str, Any]:
    """How results are made, as JSON values."""
    on_gpu = device.type == "cuda"
    return {
        "command": command,
        "commit": _commit(),
        "versions": versions() | {"cuda": torch.version.cuda},
        "device": {
            "type": device.type,
            "name": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        **more,
    }


def _commit() -> str:
    """Of the working tree that the package lies in; "unknown" where it was installed."""
    command = ["git", "-C", str(Path(nestq.__file__).parent), "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def name_of(case: Case) -> str:
    """Such as ``"speculative kv4/kv8 gamma 4"``."""
    gamma = f"gamma {case.gamma}" if case.gamma else None
    return " ".join(part for part in (case.system, case.kv, gamma) if part)


def tables(results: Results) -> list[Table]:
    """Speed and steps of each model, context and batch, then prefills; for ``rich``."""
    made = []
    for place in results.places():
        some = results.at(place)
        title = f"{place[0]} ({some[0].weights} weights), context {place[1]}, batch {place[2]}"
        made += [_speed_table(results, title, some), _step_table(results, title, some)]
    if results.prefills:
        made.append(_prefill_table(results.prefills))
    return made


def _speed_table(results: Results, title: str, some: Sequence[Measurement]) -> Table:
    table = _table(
        f"{title}: decoding",
        ("system", "acceptance"),
        (
            "tokens\na round",
            "ms a\nround",
            "tokens/s",
            "x\n16-bit",
            "x\nW8A8",
            "J a\ntoken",
            "peak\nGB",
        ),
    )
    elsewhere = {
        one.acceptance.context
        for one in some
        if one.acceptance is not None and one.acceptance.context is not None
    }
    if elsewhere:
        contexts = " or ".join(map(str, sorted(elsewhere)))
        table.caption = (
            f"Acceptance was measured in answers to prompts, with {contexts} tokens before a draft "
            f"token on average, times at {some[0].case.context}: tokens/s holds as far as "
            "acceptance is the same there."
        )
    for one in some:
        table.add_row(
            name_of(one.case),
            "" if one.acceptance is None else str(one.acceptance),
            _number(one.tokens_per_round, 3),
            _number(one.round.milliseconds, 3),
            _number(one.tokens_per_second, 1),
            _number(results.speedup(one, "16-bit"), 2),
            _number(results.speedup(one, "w8a8"), 2),
            _number(one.joules_per_token, 3),
            _number(None if one.peak_bytes is None else one.peak_bytes / 1e9, 2),
        )
    return table


def _step_table(results: Results, title: str, some: Sequence[Measurement]) -> Table:
    table = _table(
        f"{title}: steps, floor at {results.bandwidth:.2f} TB/s",
        ("system", "pass"),
        ("GB read", "floor ms", "ms", "TB/s", "of floor"),
    )
    for one in some:
        for name, step in one.steps().items():
            table.add_row(
                name_of(one.case),
                name,
                _number(step.bytes_read / 1e9, 3),
                _number(step.floor(results.bandwidth), 3),
                _number(step.milliseconds, 3),
                _number(step.terabytes_per_second, 2),
                f"{step.terabytes_per_second / results.bandwidth:.0%}",
            )
    return table


def _prefill_table(prefills: Sequence[Prefill]) -> Table:
    table = _table("Prefill", ("model", "system"), ("tokens", "ms", "tokens/s", "x 16-bit"))
    baselines = {one.model: one for one in prefills if one.system == "16-bit"}
    for one in prefills:
        baseline = baselines.get(one.model)
        ratio = None if baseline is None else baseline.milliseconds / one.milliseconds
        table.add_row(
            one.model,
            one.system,
            str(one.tokens),
            _number(one.milliseconds, 2),
            _number(one.tokens_per_second, 0),
            _number(ratio, 2),
        )
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    # Narrow, so that nothing is cut off in a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE, padding=0, pad_edge=False)
    for header in texts:
        table.add_column(header, overflow="fold", min_width=len("speculative"))
    for header in numbers:
        table.add_column(header, justify="right", overflow="fold")
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
