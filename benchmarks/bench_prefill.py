"""Time the linears of a long prompt: ours on both planes, cuBLAS BF16 and PyTorch's INT8 product.

python benchmarks/bench_prefill.py [--model llama-2-7b] [--tokens 2048] [--json RESULT.json]
python benchmarks/bench_prefill.py --configs 128,128,8,1,4 64,128,4,1,4 64,64,4,2,3

Ours and the INT8 product read quantized activations; cuBLAS reads bfloat16. ``--configs`` are ways
to divide the work of ours: rows, tokens, warps, blocks a step and stages.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_linear import DEVICE, LAYERS, OVERLAP, NestedLinear
from gpu_timing import graph_microseconds, write_result
from rich.console import Console
from rich.table import Table

from nestq.kernels.act_quant import act_quant
from nestq.kernels.prefill_linear import PrefillConfig, prefill_linear

# A product of this size takes far longer than to read its operands, so few copies do.
COPIES = 2


def division(text: str) -> PrefillConfig:
    """Of numbers with commas between them."""
    return PrefillConfig(*map(int, text.split(",")))


def measure(
    n: int, k: int, tokens: int, group_size: int, configs: list[PrefillConfig]
) -> dict[str, float]:
    """Microseconds of each kernel for one linear."""
    ours = NestedLinear((n, k), tokens, group_size, COPIES)
    x_codes, _, x_scale, _ = act_quant(ours.x, group_size, in_rows=True)
    weight_codes = torch.randint(-128, 128, (COPIES, n, k), dtype=torch.int8, device=DEVICE)
    dense = torch.randn(COPIES, n, k, dtype=torch.bfloat16, device=DEVICE)

    def both_planes(copy: int, config: PrefillConfig | None = None) -> None:
        weight = ours.weight(copy, both=True)
        prefill_linear(x_codes, x_scale[:tokens], *weight, group_size, OVERLAP, ours.out, config)

    kinds: dict[str, Callable[[int], object]] = {
        "nestq both planes (W8A8)": both_planes,
        **{f"nestq {tuple(c)}": partial(both_planes, config=c) for c in configs},
        "cuBLAS BF16": lambda copy: F.linear(ours.x, dense[copy]),
        "torch._int_mm, INT32 out": lambda copy: torch._int_mm(x_codes, weight_codes[copy].T),
    }
    return {
        kind: graph_microseconds([lambda i=i, call=call: call(i) for i in range(COPIES)])
        for kind, call in kinds.items()
    }


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(LAYERS), default="llama-2-7b")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--configs", type=division, nargs="*", default=[], help="rows,tokens,...")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    if options.tokens < 65:
        parser.error(f"--tokens must be at least 65, got {options.tokens}")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")

    title = f"{options.model}, {options.tokens} tokens, {torch.cuda.get_device_name()}"
    table = Table(title=title)
    for column in ("rows x columns", "kind", "us", "T(FL)OP/s"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    entries = []
    for n, k in LAYERS[options.model]:
        for kind, time in measure(
            n, k, options.tokens, options.group_size, options.configs
        ).items():
            rate = 2 * n * k * options.tokens / time / 1e6
            entries.append({"rows": n, "columns": k, "kind": kind, "microseconds": time})
            table.add_row(f"{n} x {k}", kind, f"{time:.0f}", f"{rate:.0f}")
    Console().print(table)
    if options.json:
        settings = {"model": options.model, "tokens": options.tokens}
        settings["group_size"] = options.group_size
        write_result(options.json, {**settings, "linears": entries})


if __name__ == "__main__":
    main()
