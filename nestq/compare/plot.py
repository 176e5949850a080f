"""Acceptance against bytes of a draft step, as a picture."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestq.compare.contenders import WEIGHTS
from nestq.compare.results import Result, Results

_COLOURS = dict(
    zip(
        WEIGHTS,
        ("#4c4c4c", "#8c8c8c", "#937860", "#c44e52", "#1f6fb4", "#dd8452", "#2e8b57"),
        strict=True,
    )
)
# Lines of labels that fit above each other.
_LINES = 24


def write_plot(path: Path, results: Results, title: str) -> None:
    """Draw a panel for each context: a point for each contender that drafts.

    To the left and up is better. Beside a name stands the speed-up over the 16-bit model that would
    be, if time were bytes.
    """
    from matplotlib.figure import Figure  # only pictures need it

    drafting = [one for one in results.results if one.draft and one.slot_acceptance is not None]
    contexts = list(dict.fromkeys(one.context for one in drafting))
    if not contexts:
        raise ValueError("--plot: nothing that was measured drafts")
    figure = Figure(figsize=(9, 6 * len(contexts)), layout="constrained")
    panels = figure.subplots(len(contexts), 1, squeeze=False)[:, 0]
    for axes, context in zip(panels, contexts, strict=True):
        some = [one for one in drafting if one.context == context]
        _draw(axes, results, some)
        gammas = ", ".join(map(str, sorted({one.gamma for one in some})))
        axes.set_title(f"{title}, context {context}, gamma {gammas}", fontsize=10)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)


def _draw(axes: Any, results: Results, some: Sequence[Result]) -> None:
    baseline = results.baseline(some[0])
    assert baseline is not None
    points = {}
    for one in some:
        assert one.draft is not None
        assert one.slot_acceptance is not None
        x = 100 * one.draft.total / baseline.step.total
        points[one.name] = x, one.slot_acceptance
        axes.plot(x, one.slot_acceptance, "o", color=_COLOURS[one.weights], markersize=7)
    heights = [y for _, y in points.values()]
    low, high = min(heights), max(heights)
    room = max(0.1 * (high - low), 0.02)
    axes.set_ylim(low - room, min(high + room, 1.02))
    axes.set_xlim(0, max(105.0, 1.05 * max(x for x, _ in points.values())))
    _label(axes, results, some, points)
    axes.set_xlabel("bytes that a draft step reads, % of a 16-bit step")
    axes.set_ylabel("slot acceptance")
    axes.grid(alpha=0.3)
    for name in dict.fromkeys(one.weights for one in some):
        axes.plot([], [], "o", color=_COLOURS[name], label=f"{name} weights")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4)


def _label(
    axes: Any, results: Results, some: Sequence[Result], points: dict[str, tuple[float, float]]
) -> None:
    """Names beside the points, moved apart where they would lie on each other."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    line = (high - low) / _LINES
    taken: list[tuple[float, float]] = []
    for one in sorted(some, key=lambda one: points[one.name][1]):
        x, y = points[one.name]
        to_the_left = x > left + 0.7 * (right - left)
        near = [at for side, at in taken if abs(side - x) < 0.33 * (right - left)]
        at = y
        while any(abs(at - other) < line for other in near):
            at += line / 4
        taken.append((x, at))
        speedup = results.expected_speedup(one)
        text = one.name if speedup is None else f"{one.name} ({speedup:.2f}x)"
        axes.annotate(
            text,
            (x, y),
            (x + (-1 if to_the_left else 1) * 0.015 * (right - left), at),
            fontsize=8,
            color=_COLOURS[one.weights],
            va="center",
            ha="right" if to_the_left else "left",
            arrowprops={
                "arrowstyle": "-",
                "alpha": 0.3,
                "relpos": (1 if to_the_left else 0, 0.5),
                "shrinkA": 0,
                "shrinkB": 3,
            },
        )
