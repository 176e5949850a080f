"""Time the linear layers of a decoder layer: ours, cuBLAS and, if installed, gemlite.

python benchmarks/bench_linear.py --bandwidth 4.39 [--model llama-2-7b] [--rows 1 5]

Every time is for all merged linears of one layer in the order in which a model calls them, weights
cold in the L2 cache. The kernels read quantized activations; the column "with activations" has the
operator as a model calls it, quantization of the activations included.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_timing import copies_for, graph_microseconds, write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from nestq.kernels.act_quant import act_quant
from nestq.kernels.dual_plane_linear import dual_plane_linear
from nestq.kernels.linear import linear
from nestq.kernels.linear_16 import linear_16

# Merged linears of a decoder layer: (rows, columns) of qkv, o, gate and up, down.
LAYERS = {
    "llama-2-7b": [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)],
    "llama-3-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "qwen2.5-7b": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
    "smollm2-135m": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
}
OVERLAP = 8
DEVICE = torch.device("cuda")

Calls = list[Callable[[], object]]


class NestedLinear:
    """Random planes of one linear, several times over, and activations for it."""

    def __init__(self, shape: tuple[int, int], rows: int, group_size: int, copies: int) -> None:
        self.n, self.k = shape
        self.group_size = group_size
        tiles, blocks, groups = self.n // 16, self.k // 64, self.k // group_size
        plane = (2, copies, tiles, blocks, 512)
        self.planes = torch.randint(0, 256, plane, dtype=torch.uint8, device=DEVICE)
        scale = (copies, tiles, groups, 16)
        self.scale = torch.randint(1000, 30000, scale, dtype=torch.int16, device=DEVICE)
        self.unit = torch.full((self.n,), 2.0**-20, device=DEVICE)
        self.x = torch.randn(rows, self.k, dtype=torch.bfloat16, device=DEVICE)
        self.codes = act_quant(self.x, group_size)[:3]
        self.out = torch.empty(rows, self.n, dtype=torch.bfloat16, device=DEVICE)

    def weight(self, copy: int, both: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
        """Base, refinement, scale, unit and no bias."""
        refinement = self.planes[1, copy] if both else None
        return self.planes[0, copy], refinement, self.scale[copy], self.unit, None

    def kernel(self, copy: int, both: bool) -> None:
        """The kernel alone, on activations that are quantized already."""
        weight = self.weight(copy, both)
        dual_plane_linear(*self.codes, *weight, self.group_size, OVERLAP, self.out)

    def operator(self, copy: int, both: bool) -> None:
        """The operator as a model calls it."""
        linear(self.x, *self.weight(copy, both), self.group_size, OVERLAP)


def nested_times(
    layer: list[tuple[int, int]], rows: int, group_size: int, both: bool
) -> tuple[float, float, int]:
    """Microseconds of the kernels and of the operators of a layer, and bytes read."""
    bytes_read = sum(n * k * (2 if both else 1) // 2 + n * k // group_size * 2 for n, k in layer)
    copies = copies_for(bytes_read)
    linears = [NestedLinear(shape, rows, group_size, copies) for shape in layer]
    times = []
    for call in (NestedLinear.kernel, NestedLinear.operator):
        calls: Calls = [
            lambda part=part, i=i, call=call: call(part, i, both)
            for i in range(copies)
            for part in linears
        ]
        times.append(graph_microseconds(calls) * len(layer))
    return times[0], times[1], bytes_read


def dense_times(layer: list[tuple[int, int]], rows: int) -> tuple[float, float, int]:
    """Microseconds of cuBLAS and of ``linear_16``, and bytes read, for bfloat16 weights."""
    bytes_read = sum(2 * n * k for n, k in layer)
    sets = [
        (
            torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE),
            torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE),
        )
        for _ in range(copies_for(bytes_read))
        for n, k in layer
    ]
    cublas = graph_microseconds([lambda x=x, w=w: F.linear(x, w) for x, w in sets])
    ours = graph_microseconds([lambda x=x, w=w: linear_16(x, w, None) for x, w in sets])
    return cublas * len(layer), ours * len(layer), bytes_read


def gemlite_times(layer: list[tuple[int, int]], rows: int) -> dict[str, float]:
    """Microseconds of gemlite's A16W4 (groups of 128) and A8W8; nothing if it is not installed."""
    try:
        from gemlite.helper import A16W4_HQQ_INT, A8W8_int8_dynamic
    except ImportError:
        return {}

    def four_bits(n: int, k: int) -> Callable[[Tensor], Tensor]:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=DEVICE)
        scale = torch.rand(n * k // 128, 1, dtype=torch.float16, device=DEVICE)
        return A16W4_HQQ_INT(DEVICE, torch.float16).from_weights(codes, scale, scale * 8)

    def eight_bits(n: int, k: int) -> Callable[[Tensor], Tensor]:
        weight = torch.randn(n, k, dtype=torch.float16, device=DEVICE)
        return A8W8_int8_dynamic(DEVICE, torch.float16).from_weights(weight)

    times = {}
    for name, build, size in (("A16W4", four_bits, 0.5), ("A8W8", eight_bits, 1)):
        copies = copies_for(int(sum(n * k for n, k in layer) * size))
        sets = [
            (torch.randn(rows, k, dtype=torch.float16, device=DEVICE), build(n, k))
            for _ in range(copies)
            for n, k in layer
        ]
        calls: Calls = [lambda x=x, module=module: module(x) for x, module in sets]
        times[name] = graph_microseconds(calls) * len(layer)
    return times


def measure(model: str, rows: int, options: argparse.Namespace) -> Iterator[dict]:
    """One entry for each kernel."""

    def entry(name: str, time: float, whole: float, bytes_read: int) -> dict:
        times = {"microseconds": time, "with_activations": whole}
        floor = bytes_read / options.bandwidth / 1e6
        return {"model": model, "linears": name, "rows": rows, **times, "floor": floor}

    layer = LAYERS[model]
    for name, both in (("nestq base (W4A8)", False), ("nestq both planes (W8A8)", True)):
        yield entry(name, *nested_times(layer, rows, options.group_size, both))
    cublas, ours, bytes_read = dense_times(layer, rows)
    yield entry("cuBLAS BF16", cublas, cublas, bytes_read)
    yield entry("nestq linear_16 (BF16)", ours, ours, bytes_read)
    if options.gemlite:
        for name, time in gemlite_times(layer, rows).items():
            bytes_read = sum(n * k for n, k in layer) // (2 if name == "A16W4" else 1)
            yield entry(f"gemlite {name}", time, time, bytes_read)


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(LAYERS), nargs="+", default=["llama-2-7b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--bandwidth", type=float, required=True, help="of the memory, TB/s")
    gemlite = "time gemlite, which tunes itself for minutes, if it is installed"
    parser.add_argument(
        "--gemlite", action=argparse.BooleanOptionalAction, default=True, help=gemlite
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    if not all(1 <= rows <= 16 for rows in options.rows):
        parser.error(f"--rows must be from 1 to 16, got {options.rows}")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")

    table = Table(title=f"Linears of one decoder layer, us, {torch.cuda.get_device_name()}")
    for column in ("model", "linears", "rows", "us", "with activations", "bytes / bandwidth"):
        table.add_column(column, justify="left" if column in ("model", "linears") else "right")
    entries = []
    for model, rows in tqdm(list(itertools.product(options.model, options.rows))):
        for entry in measure(model, rows, options):
            entries.append(entry)
            if options.json:
                write_result(options.json, {"group_size": options.group_size, "rows": entries})
    for entry in entries:
        times = (entry["microseconds"], entry["with_activations"], entry["floor"])
        numbers = (f"{time:.1f}" for time in times)
        table.add_row(entry["model"], entry["linears"], str(entry["rows"]), *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
