"""The append kernel writes the bytes of the reference."""

import pytest
import torch
from kernel_device import device
from torch import Tensor

from nestq.kernels import kv_vectors
from nestq.kernels.kv_append import kv_append
from nestq.reference import kv

Cache = tuple[Tensor, Tensor, Tensor]


def poisoned(batch: int, heads: int, capacity: int, head_dim: int) -> Cache:
    """Planes full of bytes that a write would change."""
    shape = batch, heads, capacity, head_dim // 2
    base = torch.randint(0, 256, shape, dtype=torch.uint8)
    refinement = torch.randint(0, 256, shape, dtype=torch.uint8)
    return base, refinement, torch.full(shape[:-1], -1.0)


def check(states: Tensor, positions: Tensor, capacity: int) -> None:
    """Both append the states, and write the same bytes."""
    batch, heads, _, head_dim = states.shape
    expected = poisoned(batch, heads, capacity, head_dim)
    cache = [plane.clone().to(device()) for plane in expected]
    kv.kv_append(states, positions, *expected)
    kv_append(states.to(device()), positions.to(device()), *cache)
    assert_same_bytes(cache, expected)


def assert_same_bytes(cache: list[Tensor], expected: Cache) -> None:
    for ours, theirs in zip(cache, expected, strict=True):
        # Which bits a NaN has is left to the device.
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [2, 24, 64, 80, 96, 128, 256])
def test_it_writes_the_bytes_of_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    states = torch.randn(2, 3, 5, head_dim) * torch.randn(2, 3, 5, 1).exp()
    states[0, 0, 1] = 0
    states[0, 1, 2] = states[0, 1, 2, :1].clone()  # every element at the end of the range
    states[1, 2, 4, 0] = 1000
    states = states.to(dtype)
    # The second row begins with pads.
    positions = torch.tensor([[7, 2, 3, 0, 8], [-1, -5, 0, 1, 2]])
    check(states, positions, 9)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_many_tokens_share_programs(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_vectors, "FEW_VECTORS", 10)
    torch.manual_seed(head_dim)
    positions = torch.randperm(11).repeat(2, 1) - torch.tensor([[0], [5]])
    check(torch.randn(2, 2, 11, head_dim), positions, 11)


def test_halves_round_to_even() -> None:
    halves = torch.arange(-13, 14) / 2
    states = torch.cat((halves, torch.tensor([7.0]), halves / 16, torch.tensor([0.0])))
    check(states.expand(1, 1, 1, -1), torch.tensor([[0]]), 1)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_shows_in_the_scale_of_its_own_vector() -> None:
    states = torch.randn(1, 2, 3, 64)
    states[0, 1, 2, 5] = torch.nan
    check(states, torch.tensor([[0, 1, 2]]), 3)


def test_a_strided_state_is_read_in_place() -> None:
    states = torch.randn(2, 6, 3, 64).transpose(1, 2)[:, :, 1:]
    assert not states.is_contiguous()
    check(states, torch.arange(5).repeat(2, 1), 6)


def test_nothing_to_write_writes_nothing() -> None:
    states = torch.randn(2, 2, 0, 64)
    check(states, torch.zeros(2, 0, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": torch.randn(2, 3, 4, 18)}, "states must be"),
        ({"states": torch.randn(2, 3, 4, 16, dtype=torch.float64)}, "states must be float16"),
        ({"states": torch.randn(2, 3, 16, 4).mT}, "contiguous along D"),
        ({"positions": torch.arange(4)}, "positions must be int64 of shape"),
        ({"positions": torch.zeros(4, 2, dtype=torch.int64).mT}, "positions must be contiguous"),
        ({"base": torch.zeros(2, 3, 8, 8)}, "base must be uint8"),
        ({"refinement": torch.zeros(2, 3, 8, 4, dtype=torch.uint8)}, "refinement must be"),
        ({"scale": torch.zeros(2, 8, 3).mT}, "scale must be contiguous"),
        ({"scale": torch.zeros(2, 3, 8, device="meta")}, "scale must be on the device"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    base, refinement, scale = poisoned(2, 3, 8, 16)
    arguments = {
        "states": torch.randn(2, 3, 4, 16),
        "positions": torch.arange(4).repeat(2, 1),
        "base": base,
        "refinement": refinement,
        "scale": scale,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        kv_append(**arguments)
