"""What was compared, as tables for ``rich`` that fit 80 columns."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from nestq.compare.contenders import CONTENDERS
from nestq.compare.results import BytesRead, Result, Results

# In which bytes are printed: of the first that the largest number is at least one of.
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def comparison_tables(results: Results) -> list[Table]:
    """A table for each context, and one of speed where decoding was timed."""
    contexts = dict.fromkeys(one.context for one in results.results)
    order = list(CONTENDERS)
    made = []
    for context in contexts:
        some = sorted(results.at(context), key=lambda one: order.index(one.name))
        made.append(_quality_table(results, context, some))
        if any(one.speed is not None for one in some):
            made.append(_speed_table(results, context, some))
    return made


def _quality_table(results: Results, context: int, some: Sequence[Result]) -> Table:
    unit, size = unit_of([one.memory_bytes for one in some])
    gammas = sorted({one.gamma for one in some if one.gamma})
    synthetic = any(one.acceptance == "synthetic" for one in some)
    table = narrow_table(
        f"Context {context}, gamma {' '.join(map(str, gammas)) or '-'}",
        f"slot: acceptance{', synthetic' if synthetic else ''}; tokens: a round; first: acceptance "
        f"of the first draft token; ppl: of the target; stored, draft, verify: {unit} of weights "
        "and cache at batch 1, in memory and read by a step; gain: speed-up over 16-bit, if time "
        "were bytes",
    )
    for header in ("slot", "tokens", "first", "ppl", "stored", "draft", "verify", "gain"):
        table.add_column(header, justify="right")
    for one in some:
        table.add_row(
            one.name,
            number(one.slot_acceptance, 3),
            number(one.tokens_per_round if one.gamma else None, 2),
            number(one.first_position, 3),
            "-" if one.perplexity is None else f"{one.perplexity:.5g}",
            number(one.memory_bytes / size, 1),
            in_unit(one.draft, size),
            in_unit(one.verification or one.step, size),
            number(results.expected_speedup(one), 2),
        )
    return table


def _speed_table(results: Results, context: int, some: Sequence[Result]) -> Table:
    table = narrow_table(f"Context {context}: times at batch 1", "")
    for header in ("draft ms", "verify ms", "round ms", "tokens/s", "x 16-bit", "by bytes"):
        table.add_column(header, justify="right")
    for one in some:
        if one.speed is not None:
            table.add_row(
                one.name,
                number(one.speed.draft_milliseconds, 2),
                number(one.speed.verification_milliseconds, 2),
                number(one.speed.round_milliseconds, 2),
                number(one.tokens_per_second, 1),
                number(results.speedup(one), 2),
                number(results.expected_speedup(one), 2),
            )
    return table


def unit_of(sizes: Sequence[float]) -> tuple[str, float]:
    """Name and bytes of a unit in which sizes are easy to read."""
    largest = max(sizes, default=0)
    return next(
        ((name, size) for name, size in _UNITS.items() if largest >= 10 * size), ("kB", 1e3)
    )


def narrow_table(title: str, caption: str) -> Table:
    """A table of 80 columns whose first names the rows."""
    table = Table(
        title=title,
        caption=caption or None,
        box=box.SIMPLE,
        collapse_padding=True,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("recipe", no_wrap=True)
    return table


def in_unit(read: BytesRead | None, size: float) -> str:
    """Bytes that were read, in a unit."""
    return number(None if read is None else read.total / size, 1)


def number(value: float | None, digits: int) -> str:
    """A number with so many digits behind the point; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"
