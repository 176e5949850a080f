"""What ``nestq bench`` measured, as a picture."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nestq.bench.measure import Measurement
from nestq.bench.report import Results, name_of

_COLOURS = {"draft steps": "#4c72b0", "verification": "#dd8452", "rest": "#8c8c8c"}


def check_plot(path: Path) -> None:
    """Refuse what no picture can be written to.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to install it.
        ValueError: matplotlib does not know the kind of file.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"--plot {path}: the package matplotlib is not installed: pip install 'nestq[dev]'"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ValueError(f"--plot {path}: the name must end in one of {', '.join(sorted(known))}")


def write_plot(path: Path, results: Results) -> None:
    """Draw a row of two panels for each model, context and batch.

    Left: milliseconds of each kind of step, beside what reading its bytes takes. Right: what a
    speculative round is made of.
    """
    from matplotlib.figure import Figure  # only pictures need it

    places = results.places()
    figure = Figure(figsize=(11, 3.6 * len(places)), layout="constrained")
    panels = figure.subplots(len(places), 2, squeeze=False)
    for (left, right), place in zip(panels, places, strict=True):
        some = results.at(place)
        _draw_steps(left, results, some)
        left.set_title(f"{place[0]}, context {place[1]}, batch {place[2]}", fontsize=9)
        _draw_rounds(right, [one for one in some if one.case.gamma])
        right.set_title("what a round is made of", fontsize=9)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)


def _draw_steps(axes: Any, results: Results, some: list[Measurement]) -> None:
    """Bars of the forward passes; a black line is the floor."""
    bars = {
        f"{name_of(one.case)}\n{name}": step
        for one in some
        for name, step in one.steps().items()
        if name != "round"
    }
    times = [step.milliseconds for step in bars.values()]
    floors = [step.floor(results.bandwidth) for step in bars.values()]
    axes.barh(range(len(bars)), times, color="#4c72b0", label="measured")
    axes.barh(
        range(len(bars)),
        floors,
        fill=False,
        hatch="//",
        label=f"bytes at {results.bandwidth:.2f} TB/s",
    )
    for place, (time, floor) in enumerate(zip(times, floors, strict=True)):
        axes.text(time, place, f" {time:.3g} ({floor / time:.0%})", va="center", fontsize=7)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step (share of the floor)")
    axes.margins(x=0.2)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def _draw_rounds(axes: Any, some: list[Measurement]) -> None:
    """Stacked bars of drafting, verification, and what is left of a round."""
    labels = []
    for place, one in enumerate(some):
        assert one.draft is not None
        assert one.verification is not None
        parts = {
            "draft steps": one.case.gamma * one.draft.milliseconds,
            "verification": one.verification.milliseconds,
        }
        parts["rest"] = max(one.round.milliseconds - sum(parts.values()), 0.0)
        start = 0.0
        for name, time in parts.items():
            label = name if place == 0 else None
            axes.barh(place, time, left=start, color=_COLOURS[name], label=label)
            start += time
        speed = one.tokens_per_second
        known = "" if speed is None else f"\n{speed:.4g} tokens/s, {one.acceptance}"
        labels.append(name_of(one.case) + known)
    axes.set_yticks(range(len(some)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms a round")
    if some:
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
