"""Launches of many rows: grids that CUDA can launch, and errors for those that it cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nestq.kernels import (
    append_16,
    attention_quantspec,
    kv_append,
    nested_attention,
    quantspec_append,
    rotate_append,
)
from nestq.kernels.arguments import MAX_PROGRAMS
from nestq.reference.quantspec import SLOTS


class Launches:
    """In place of a kernel: keeps the grids, and computes nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *arguments, **constants: None


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device="meta")


def zeros(*shape: int) -> Tensor:
    """Without numbers, which only kernels would read."""
    return torch.zeros(shape, dtype=torch.float16, device="meta")


def positions(batch: int) -> Tensor:
    return torch.zeros(batch, 1, dtype=torch.int64, device="meta")


def planes(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return codes(batch, 2, 128, 8), codes(batch, 2, 128, 8), zeros(batch, 2, 128).float()


def quantspec(batch: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Planes, scales and zero points of keys and of values, and a buffer."""
    both = [codes(batch, 2, 128, 8), codes(batch, 2, 128, 8)]
    keys = [*both, *(zeros(batch, 2, 1, 16).float() for _ in "sz")]
    values = [*both, *(zeros(batch, 2, 128, 1).float() for _ in "sz")]
    return keys, values, zeros(batch, 2, SLOTS, 16)


def _kv_append(batch: int) -> None:
    kv_append.kv_append(zeros(batch, 2, 1, 16), positions(batch), *planes(batch))


def _append_16(batch: int) -> None:
    states, cache = zeros(batch, 2, 1, 16), zeros(batch, 2, 128, 16)
    append_16.append_16(states, states, positions(batch), cache, cache)


def _rotate_append(batch: int) -> None:
    states, angles = zeros(batch, 2, 1, 16), zeros(1, 1, 16)
    caches = *planes(batch), *planes(batch)
    rotate_append.rotate_append(states, states, states, angles, angles, positions(batch), *caches)


def _quantspec_append(batch: int) -> None:
    states = zeros(batch, 2, 1, 16)
    keys, values, recent = quantspec(batch)
    caches = recent, *keys, recent, *values
    quantspec_append.quantspec_append(states, states, positions(batch), *caches)


def _nested_attention(batch: int) -> None:
    query = zeros(batch, 2, 1, 16)
    caches = *planes(batch), *planes(batch)
    nested_attention.nested_attention(query, positions(batch), *caches, 1.0, 0, 0)


def _attention_16(batch: int) -> None:
    cache = zeros(batch, 2, 128, 16)
    query = zeros(batch, 2, 1, 16)
    nested_attention.attention_16(query, positions(batch), cache, cache, 1.0, 0)


def _quantspec_attention(batch: int) -> None:
    keys, values, recent = quantspec(batch)
    caches = *keys, *values, recent, recent
    query = zeros(batch, 2, 1, 16)
    attention_quantspec.quantspec_attention(query, positions(batch), *caches, 1.0, 0)


# Module and names of the kernels, what calls them, rows that are too many, and the error's subject.
CALLS: dict[str, tuple[Any, list[str], Callable[[int], None], int, str]] = {
    "kv_append": (kv_append, ["kv_append_kernel"], _kv_append, 32768, "batch x heads"),
    "append_16": (append_16, ["append_16_kernel"], _append_16, 32768, "batch x heads"),
    "rotate_append": (rotate_append, ["rotate_append_kernel"], _rotate_append, 65536, "batch"),
    "quantspec_append": (
        quantspec_append,
        ["quantspec_append_kernel"],
        _quantspec_append,
        32768,
        "batch x heads",
    ),
    "nested_attention": (
        nested_attention,
        ["attention_kernel", "combine_kernel"],
        _nested_attention,
        32768,
        "batch x KV heads",
    ),
    "attention_16": (
        nested_attention,
        ["attention_kernel", "combine_kernel"],
        _attention_16,
        32768,
        "batch x KV heads",
    ),
    "quantspec_attention": (
        attention_quantspec,
        ["quantspec_kernel", "combine_quantspec_kernel"],
        _quantspec_attention,
        32768,
        "batch x KV heads",
    ),
}


@pytest.mark.parametrize(
    ("module", "kernels", "call", "rows", "subject"), CALLS.values(), ids=CALLS
)
def test_every_grid_can_be_launched(
    module: Any,
    kernels: list[str],
    call: Callable[[int], None],
    rows: int,
    subject: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = Launches()
    for kernel in kernels:
        monkeypatch.setattr(module, kernel, launches)
    call(rows - 1)
    assert launches.grids
    assert all(size <= MAX_PROGRAMS for grid in launches.grids for size in grid[1:])
    launches.grids.clear()
    with pytest.raises(ValueError, match=f"{subject} must be at most 65535 in a call, got 65536"):
        call(rows)
    assert not launches.grids
