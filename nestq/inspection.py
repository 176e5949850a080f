"""A table of what a nested checkpoint holds, from its headers alone."""

import math
from pathlib import Path

from rich import box
from rich.table import Table

from nestq.checkpoint import weight_files
from nestq.checkpoint_format import StoredTensor, plane_tensors, read_headers
from nestq.hf_quantizer import NestedConfig

BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "BOOL": 1}
PARTS = {"base": "base planes", "refinement": "refinement planes", "scale": "scales"}


def checkpoint_table(folder: Path, config: NestedConfig) -> Table:
    """One row a nested linear, with its bytes and what quantization reported; then totals.

    It fits 80 columns.

    Args:
        folder: checkpoint; only headers of its safetensors files are read.
        config: its ``quantization_config``.

    Raises:
        FileNotFoundError, ValueError: a file or a nested tensor is missing or damaged.
    """
    headers = read_headers(weight_files(folder))
    parts = plane_tensors(config.planes)
    for name in config.modules:
        for part in parts:
            if f"{name}.weight.{part}" not in headers:
                raise ValueError(f"{folder}: tensor {name}.weight.{part} is missing")
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
        sizes = {part: _bytes(headers[f"{name}.weight.{part}"]) for part in parts}
        for part, size in sizes.items():
            totals[part] += size
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
    rest = sum(map(_bytes, headers.values())) - sum(totals.values())
    table.add_row("dense (embedding, norms)", "", _kib(rest))
    return table


def _bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * BYTES[tensor.dtype]


def _kib(size: int) -> str:
    return f"{size / 1024:,.1f}"


def _percent(report: dict[str, float] | None, key: str) -> str:
    return "-" if report is None else f"{report[key]:.2%}"
