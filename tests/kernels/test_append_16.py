"""The kernel that appends 16-bit keys and values writes what the reference writes."""

from typing import Any

import pytest
import torch
from kernel_device import device
from torch import Tensor

from nestq.kernels.append_16 import append_16
from nestq.reference import dense_kv


def check(keys: Tensor, values: Tensor, positions: Tensor, capacity: int) -> None:
    """In a cache full of numbers that a write would change."""
    batch, heads, _, head_dim = keys.shape
    # The interpreter cuts float32 off where it should round to bfloat16.
    dtype = torch.bfloat16 if keys.dtype == torch.bfloat16 else torch.float16
    expected = [torch.randn(batch, heads, capacity, head_dim).to(dtype) for _ in "kv"]
    caches = [cache.to(device(), copy=True) for cache in expected]
    dense_kv.append_16(keys, values, positions, *expected)
    append_16(*(x.to(device()) for x in (keys, values, positions)), *caches)
    for ours, theirs in zip(caches, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [2, 24, 64, 80, 128])
def test_it_writes_what_the_reference_writes(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    keys, values = (torch.randn(2, 3, 5, head_dim).to(dtype) for _ in "kv")
    # The second row begins with pads.
    check(keys, values, torch.tensor([[7, 2, 3, 0, 8], [-1, -5, 0, 1, 2]]), 9)


def test_states_are_read_in_place() -> None:
    merged = torch.randn(2, 3, 9, 64).bfloat16().transpose(1, 2)
    _, keys, values = merged.split([5, 2, 2], dim=1)
    assert not keys.is_contiguous()
    check(keys, values, torch.tensor([[0, 1, 2], [3, 4, 5]]), 6)


def test_a_row_of_pads_writes_nothing() -> None:
    keys, values = torch.randn(2, 1, 1, 2, 16)
    caches = [torch.ones(1, 1, 4, 16, device=device()) for _ in "kv"]
    append_16(keys.to(device()), values.to(device()), torch.full((1, 2), -1).to(device()), *caches)
    assert all((cache == 1).all() for cache in caches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(1, 2, 3, 18)}, "keys must be"),
        ({"values": torch.zeros(1, 2, 4, 16)}, "values must have the shape of keys"),
        ({"keys": torch.zeros(1, 2, 3, 16).double()}, "keys must be float16"),
        ({"keys": torch.zeros(1, 2, 16, 3).mT}, "keys must be contiguous along D"),
        ({"positions": torch.tensor([[0, 1]])}, "positions must be int64 of shape"),
        ({"value_cache": torch.zeros(1, 2, 8, 16)}, "value_cache must be"),
        ({"key_cache": torch.zeros(1, 9, 2, 16).transpose(1, 2)}, "key_cache must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    arguments: dict[str, Any] = {
        "keys": torch.zeros(1, 2, 3, 16),
        "values": torch.zeros(1, 2, 3, 16),
        "positions": torch.tensor([[0, 1, 2]]),
        "key_cache": torch.zeros(1, 2, 9, 16),
        "value_cache": torch.zeros(1, 2, 9, 16),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        append_16(**arguments)
