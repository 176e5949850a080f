"""Times on the device: calls as CUDA graphs, and what the memory can do."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Call = Callable[[], Any]

# What was measured with a kernel that only reads, in TB/s, by a part of the device's name.
KNOWN_BANDWIDTHS = {"H200": 4.39}
# Bytes that are copied to measure the bandwidth: far more than caches hold.
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
WARM_UP_CALLS = 2


def captured(call: Call, device: torch.device) -> Call:
    """A call as the replay of a CUDA graph; on a CPU the call itself.

    The call must not wait for the device, and must find the same memory in every replay.
    """
    if device.type != "cuda":
        return call
    # What compiles, allocates or measures when it first runs must have run.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def milliseconds(call: Call, count: int, device: torch.device) -> float:
    """Median time of a call among ``count``, which follow each other without a pause."""
    call()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(count):
            call()
            times.append(time.perf_counter())
        return 1000 * statistics.median(end - start for start, end in pairwise(times))
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairwise(events))


def bandwidth(device: torch.device) -> tuple[float, str]:
    """Bandwidth of the memory in TB/s, and where the number comes from."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, known in KNOWN_BANDWIDTHS.items():
            if part in name:
                return known, f"known for {part}"
    size = COPIED_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    time_of_copy = milliseconds(lambda: target.copy_(source), 10, device)
    # A copy reads and writes.
    return 2 * size / time_of_copy / 1e9, "measured by a copy"
