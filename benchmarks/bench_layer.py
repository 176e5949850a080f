"""Time a decoder layer as decoding runs it, kernel by kernel, in a CUDA graph of several layers.

python benchmarks/bench_layer.py [--model llama-2-7b] [--context 2048] [--rows 1 5] [--json FILE]

A draft step has one row and reads base planes of the weights; a verification has several and reads
both. Weights and caches differ from layer to layer and are not in the L2 cache. The gap in front of
a kernel is time in which none runs.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_linear import DEVICE, LAYERS, OVERLAP, NestedLinear
from gpu_timing import write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from nestq.kernels.act_quant import act_quant
from nestq.kernels.dual_plane_linear import dual_plane_linear
from nestq.kernels.nested_attention import nested_attention
from nestq.kernels.rotate_append import rotate_append

HEAD_DIM = 128
GROUP_SIZE = 64
LAYER_COUNT = 8
REPEATS = 20
# Query heads and key-value heads.
HEADS = {"llama-2-7b": (32, 32), "llama-3-8b": (32, 8), "qwen2.5-7b": (28, 4)}


@dataclass
class Layer:
    """Random weights and cache of one layer, and what its kernels write."""

    linears: list[NestedLinear]
    planes: list[Tensor]


def random_layer(model: str, rows: int, capacity: int) -> Layer:
    linears = [NestedLinear(shape, rows, GROUP_SIZE, copies=1) for shape in LAYERS[model]]
    shape = 1, HEADS[model][1], capacity
    planes: list[Tensor] = []
    for _ in ("keys", "values"):
        codes = (2, *shape, HEAD_DIM // 2)
        planes += torch.randint(0, 256, codes, dtype=torch.uint8, device=DEVICE)
        planes.append(torch.rand(shape, device=DEVICE))
    return Layer(linears, planes)


class Decoder:
    """Some layers, and a token or a few at the end of a context.

    Args:
        model: name of the shape.
        rows: tokens.
        context: cached positions.
        both: whether weights are read with their refinement.
        kv8: whether keys and values are.
    """

    def __init__(self, model: str, rows: int, context: int, both: bool, kv8: bool) -> None:
        self.heads, self.kv_heads = HEADS[model]
        self.both, self.kv8 = both, kv8
        hidden = LAYERS[model][1][0]
        self.positions = torch.arange(context, context + rows, device=DEVICE)[None]
        self.layers = [
            random_layer(model, rows, context + rows)
            for _ in tqdm(range(LAYER_COUNT), desc="random layers", leave=False)
        ]
        self.angles = torch.randn(2, 1, rows, HEAD_DIM, device=DEVICE).bfloat16()
        self.norm = torch.ones(hidden, device=DEVICE).bfloat16()
        self.hidden, self.residual = torch.randn(2, rows, hidden, device=DEVICE).bfloat16()

    def __call__(self) -> None:
        x, residual = self.hidden, self.residual
        for layer in self.layers:
            qkv, o, gate_up, down = layer.linears
            residual = self._linear(qkv, x, residual=residual, norm_weight=self.norm)
            attended = self._attention(layer, qkv.out)
            self._linear(o, attended)
            residual = self._linear(gate_up, o.out, residual=residual, norm_weight=self.norm)
            gate, up = gate_up.out.chunk(2, dim=1)
            self._linear(down, up, gate=gate)
            x = down.out

    def _linear(self, linear: NestedLinear, x: Tensor, **fused: Tensor) -> Tensor:
        """Into ``linear.out``; gives ``x + residual``."""
        codes, sums, scale, total = act_quant(x, GROUP_SIZE, eps=1e-5, **fused)
        weight = linear.weight(0, self.both)
        dual_plane_linear(codes, sums, scale, *weight, GROUP_SIZE, OVERLAP, linear.out)
        return total

    def _attention(self, layer: Layer, qkv: Tensor) -> Tensor:
        rows = qkv.shape[0]
        states = qkv.view(1, rows, -1, HEAD_DIM).transpose(1, 2)
        states = states.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query = rotate_append(*states, *self.angles, self.positions, *layer.planes)
        key_base, key_fine, key_scale, value_base, value_fine, value_scale = layer.planes
        fine = (key_fine, value_fine) if self.kv8 else (None, None)
        keys, values = (key_base, fine[0], key_scale), (value_base, fine[1], value_scale)
        scaling = HEAD_DIM**-0.5
        out = nested_attention(query, self.positions, *keys, *values, scaling, 0, 0)
        return out.transpose(1, 2).reshape(rows, -1)


def kernel_times(decoder: Decoder) -> list[tuple[str, float, float]]:
    """Kernel, its microseconds and those of the gap in front of it, in order, of a later layer."""
    decoder()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder()
    sums: dict[int, tuple[str, float, float]] = {}
    for _ in range(REPEATS):
        graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            graph.replay()
            torch.cuda.synchronize()
        kernels = [e for e in profiled.events() or () if e.device_type.name == "CUDA"]
        kernels.sort(key=lambda event: event.time_range.start)
        count = len(kernels) // LAYER_COUNT
        for i in range(count, len(kernels)):  # without the first layer, which follows nothing
            span, before = kernels[i].time_range, kernels[i - 1].time_range
            _, time, gap = sums.get(i % count, ("", 0.0, 0.0))
            sums[i % count] = (
                kernels[i].name,
                time + span.elapsed_us(),
                gap + span.start - before.end,
            )
    measured = REPEATS * (LAYER_COUNT - 1)
    return [
        (name, time / measured, gap / measured) for _, (name, time, gap) in sorted(sums.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=HEADS, default="llama-2-7b")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    results = []
    for rows in options.rows:
        for both, kv8 in ((False, False), (False, True), (True, True)):
            if rows > 1 and not both:
                continue  # a draft step has one token
            decoder = Decoder(options.model, rows, options.context, both, kv8)
            times = kernel_times(decoder)
            del decoder
            name = f"{'W8' if both else 'W4'}, {'KV8' if kv8 else 'KV4'}, {rows} row(s)"
            title = f"{options.model}, context {options.context}: {name}"
            table = Table("kernel", "us", "gap us", title=title)
            for kernel, time, gap in times:
                table.add_row(kernel, f"{time:.2f}", f"{gap:.2f}")
            total = sum(time + gap for _, time, gap in times)
            table.add_row("layer", f"{total:.1f}", "")
            Console().print(table)
            results.append({"what": name, "kernels": times, "layer_microseconds": total})
            if options.json:
                arguments = {"model": options.model, "context": options.context}
                write_result(options.json, arguments | {"results": results})


if __name__ == "__main__":
    main()
