"""Time GPU work as a decode step runs it: in a CUDA graph, its operands not in a cache."""

import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

# More than any GPU's L2 cache holds.
COLD_BYTES = 256 * 2**20


def copies_for(bytes_read: int) -> int:
    """How many sets of operands must take turns so that none is in the L2 cache."""
    return max(2, -(-COLD_BYTES // bytes_read))


def graph_microseconds(calls: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Median time of a call, in microseconds: all calls are one CUDA graph that is replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def write_result(file: Path, result: dict[str, Any]) -> None:
    """Write a result with its machine, versions and commit, under another name first."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"environment": _environment()} | result, indent=1) + "\n")
    temporary.replace(file)


def _environment() -> dict[str, str]:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": described.stdout.strip() or "unknown",
    }
