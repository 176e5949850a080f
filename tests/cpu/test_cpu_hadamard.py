"""The transform in C++ gives the reference's bits."""

from typing import Any

import pytest
import torch
from same_bits import same_bits

from nestq.cpu.hadamard import can_compute, hadamard
from nestq.cpu.library import compile_library
from nestq.reference.hadamard import hadamard as reference


@pytest.fixture(scope="module")
def compiled() -> Any:
    return compile_library()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 24, 64, 80, 256])
def test_bits_of_the_reference(compiled: Any, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x = (10 * torch.randn(2, 5, 3, size)).to(dtype)
    x[0, 0, 0, 0], x[0, 1, 0, 1], x[1, 0, 0] = torch.nan, torch.inf, 0
    for states in (x, x.transpose(1, 2), x[:, :0], x[0, 2, 0]):
        before = states.clone()
        out = hadamard(compiled, states)
        assert out.is_contiguous()
        assert same_bits(out, reference(states))
        assert same_bits(states, before)


def test_float64_is_for_the_reference() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)
    assert not can_compute(x)
    assert torch.equal(torch.ops.nestq.hadamard(x), reference(x))
    assert same_bits(torch.ops.nestq.hadamard(x.float()), reference(x.float()))


def test_what_cannot_be_transformed_is_refused(compiled: Any) -> None:
    with pytest.raises(ValueError, match="x must be floating point"):
        hadamard(compiled, torch.zeros(2, 15))
