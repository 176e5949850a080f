"""A table of what a nested checkpoint holds, from its headers alone."""

import math
from pathlib import Path

from rich import box
from rich.table import Table

from nestq.checkpoint import PART_NAMES, weight_files
from nestq.checkpoint_format import StoredTensor, plane_tensors, read_headers
from nestq.hf_quantizer import NestedConfig

BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "BOOL": 1}


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
    parts = plane_tensors(config.planes, config.target_part)
    four_bit = config.four_bit_format
    for name in config.modules:
        for part in parts:
            # The dense weight of a tied head is the embedding's.
            optional = part == "dense" and four_bit is not None and four_bit.tied_head
            if f"{name}.weight.{part}" not in headers and not optional:
                raise ValueError(f"{folder}: tensor {name}.weight.{part} is missing")
    linears = {entry["name"]: entry for entry in (config.report or {}).get("linears", ())}
    table = Table(
        title=f"{folder}: {_options(config)}format {config.format_version}",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("linear", no_wrap=True)
    for header in ("shape", "KiB", "draft\nerror", "target\nerror", "saturated"):
        table.add_column(header, justify="right")
    every = plane_tensors("both", config.target_part) if config.modules else ()
    totals = {part: 0 for part in PART_NAMES if part in every}
    for name in config.modules:
        stored = {part: headers.get(f"{name}.weight.{part}") for part in parts}
        sizes = {part: _bytes(tensor) for part, tensor in stored.items() if tensor is not None}
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
        table.add_row(PART_NAMES[part], "", _kib(size))
    saturation = (config.report or {}).get("saturation")
    last = "-" if saturation is None else f"{saturation:.2%}"
    table.add_row(f"{len(config.modules)} linears", "", _kib(sum(totals.values())), "", "", last)
    rest = sum(map(_bytes, headers.values())) - sum(totals.values())
    table.add_row("dense (embedding, norms)", "", _kib(rest))
    return table


def _options(config: NestedConfig) -> str:
    """Of the format, for the title."""
    if not config.modules:
        return ""
    if config.overlap is not None:
        return f"groups of {config.group_size}, overlap {config.overlap}, "
    return f"groups of {config.group_size}, "


def _bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * BYTES[tensor.dtype]


def _kib(size: int) -> str:
    return f"{size / 1024:,.1f}"


def _percent(report: dict[str, float] | None, key: str) -> str:
    return "-" if report is None else f"{report[key]:.2%}"
