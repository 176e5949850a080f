"""A table of what a nested checkpoint holds, from its headers alone."""

import math
from pathlib import Path

from rich import box
from rich.table import Table

from nestq.checkpoint_format import StoredTensor, read_headers
from nestq.hf_quantizer import NestedConfig

BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "BOOL": 1}
PARTS = {"base": "base planes", "refinement": "refinement planes", "scale": "scales"}


def checkpoint_table(folder: Path, config: NestedConfig) -> Table:
    """One row a nested linear, with its bytes and what quantization reported; then totals.

    It fits 80 columns.

    Args:
        folder: checkpoint; only headers of its safetensors files are read.
        config: its ``quantization_config``.
    """
    headers = read_headers(sorted(folder.glob("*.safetensors")))
    linears = {entry["name"]: entry for entry in (config.report or {}).get("linears", ())}
    table = Table(
        title=f"{folder}: groups of {config.group_size}, overlap {config.overlap}, "
        f"format {config.format_version}",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("linear", no_wrap=True)
    for header in ("shape", "KiB", "draft\nerror", "target\nerror", "saturated"):
        table.add_column(header, justify="right")
    totals = dict.fromkeys(PARTS, 0)
    for name in config.modules:
        sizes = {
            part: _bytes(headers[key]) if (key := f"{name}.weight.{part}") in headers else 0
            for part in PARTS
        }
        totals = {part: totals[part] + sizes[part] for part in PARTS}
        report = linears.get(name)
        table.add_row(
            name.removeprefix("model."),
            "-" if report is None else "x".join(map(str, report["shape"])),
            _kib(sum(sizes.values())),
            *(_percent(report, key) for key in ("draft_error", "target_error", "saturation")),
        )
    table.add_section()
    for part, size in totals.items():
        table.add_row(PARTS[part], "", _kib(size))
    saturation = (config.report or {}).get("saturation")
    last = "-" if saturation is None else f"{saturation:.2%}"
    table.add_row(f"{len(config.modules)} linears", "", _kib(sum(totals.values())), "", "", last)
    nested = {f"{name}.weight.{part}" for name in config.modules for part in PARTS}
    rest = sum(_bytes(tensor) for name, tensor in headers.items() if name not in nested)
    table.add_row("dense (embedding, norms)", "", _kib(rest))
    return table


def _bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * BYTES[tensor.dtype]


def _kib(size: int) -> str:
    return f"{size / 1024:,.1f}"


def _percent(report: dict[str, float] | None, key: str) -> str:
    return "-" if report is None else f"{report[key]:.2%}"
