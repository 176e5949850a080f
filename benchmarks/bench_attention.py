"""Time attention over a cache: ours on KV4, KV8 and 16-bit planes, and PyTorch's on 16 bits.

python benchmarks/bench_attention.py --bandwidth 4.39 [--keys 2048 32768] [--json RESULT.json]

Batch 1, head size 128, all keys visible, cache cold in the L2 cache.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_timing import copies_for, graph_microseconds, write_result
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from nestq.kernels.nested_attention import attention_16, nested_attention

HEADS = 32
HEAD_DIM = 128
DEVICE = torch.device("cuda")


def nested_calls(
    kv_heads: int, keys: int, queries: int, both: bool
) -> tuple[list[Callable[[], object]], int]:
    """Calls over random planes, and bytes that one reads."""
    bytes_read = 2 * kv_heads * keys * (HEAD_DIM // 2 * (2 if both else 1) + 4)
    query = torch.randn(1, HEADS, queries, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    positions = torch.arange(keys - queries, keys, device=DEVICE)[None]
    plane, scale = (1, kv_heads, keys, HEAD_DIM // 2), (1, kv_heads, keys)

    def half() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        planes = [torch.randint(0, 256, plane, dtype=torch.uint8, device=DEVICE) for _ in "br"]
        return planes[0], planes[1] if both else None, torch.rand(scale, device=DEVICE)

    sets = [(*half(), *half()) for _ in range(copies_for(bytes_read))]
    scaling = HEAD_DIM**-0.5
    return [
        lambda cache=cache: nested_attention(query, positions, *cache, scaling, 0, 0)
        for cache in sets
    ], bytes_read


def dense_calls(
    kv_heads: int, keys: int, queries: int, ours: bool
) -> tuple[list[Callable[[], object]], int]:
    """Calls over 16-bit keys and values, and bytes that one reads."""
    bytes_read = 2 * kv_heads * keys * HEAD_DIM * 2
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    query = torch.randn(1, HEADS, queries, HEAD_DIM, **options)
    positions = torch.arange(keys - queries, keys, device=DEVICE)[None]
    shape = (1, kv_heads, keys, HEAD_DIM)
    sets = [
        (torch.randn(shape, **options), torch.randn(shape, **options))
        for _ in range(copies_for(bytes_read))
    ]
    if ours:
        return [
            lambda k=k, v=v: attention_16(query, positions, k, v, HEAD_DIM**-0.5, 0)
            for k, v in sets
        ], bytes_read
    grouped = kv_heads != HEADS
    return [
        lambda k=k, v=v: F.scaled_dot_product_attention(query, k, v, enable_gqa=grouped)
        for k, v in sets
    ], bytes_read


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--bandwidth", type=float, required=True, help="of the memory, TB/s")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")

    kinds = {
        "nestq KV4": lambda *shape: nested_calls(*shape, False),
        "nestq KV8": lambda *shape: nested_calls(*shape, True),
        "nestq 16-bit": lambda *shape: dense_calls(*shape, True),
        "SDPA BF16 (no mask)": lambda *shape: dense_calls(*shape, False),
    }
    table = Table(title=f"Attention, {HEADS} heads of {HEAD_DIM}, {torch.cuda.get_device_name()}")
    for column in ("KV heads", "keys", "queries", "kind", "us", "bytes / bandwidth"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    shapes = itertools.product(options.kv_heads, options.keys, options.queries)
    entries = []
    for (kv_heads, keys, queries), kind in tqdm(list(itertools.product(shapes, kinds))):
        work, bytes_read = kinds[kind](kv_heads, keys, queries)
        time, floor = graph_microseconds(work), bytes_read / options.bandwidth / 1e6
        del work  # before the next shape's caches
        shape = {"kv_heads": kv_heads, "keys": keys, "queries": queries}
        entries.append({**shape, "kind": kind, "microseconds": time, "floor": floor})
        sizes = (str(size) for size in shape.values())
        table.add_row(*sizes, kind, f"{time:.1f}", f"{floor:.1f}")
        if options.json:
            write_result(options.json, {"rows": entries})
    Console().print(table)


if __name__ == "__main__":
    main()
