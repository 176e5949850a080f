"""The kernel gives the bits of the reference."""

import pytest
import torch
from kernel_device import device
from torch import Tensor

from nestq.kernels.hadamard import hadamard
from nestq.reference.hadamard import hadamard as reference

# Triton's interpreter rounds float32 to bfloat16 towards zero.
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


def check(x: Tensor) -> None:
    """Kernel and reference agree, whatever lies around the vectors."""
    out, expected = hadamard(x), reference(x)
    assert out.is_contiguous()
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    assert torch.equal(out.view(bits), expected.to(out.device).view(bits))


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16, torch.float32])
@pytest.mark.parametrize("size", [2, 64, 80, 96, 128, 256])
def test_it_gives_the_bits_of_the_reference(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    check((10 * torch.randn(2, 5, 3, size)).to(device(), dtype))


def test_states_may_be_a_part_of_a_merged_output() -> None:
    torch.manual_seed(0)
    merged = torch.randn(2, 3, 8, 64, device=device()).transpose(1, 2)
    for states in merged.split([4, 2, 2], 1):
        assert not states.is_contiguous()
        check(states)


@pytest.mark.parametrize("shape", [(64,), (7, 64), (3, 7, 64), (2, 2, 3, 2, 64), (3, 0, 64)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check(torch.randn(shape, device=device()))


def test_a_program_may_have_more_than_is_left() -> None:
    torch.manual_seed(0)
    check(torch.randn(1, 1, 9, 64, device=device()))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 16).double(), "x must be float16, bfloat16 or float32"),
        (torch.zeros(2, 15), "D even"),
        (torch.zeros(2, 16, dtype=torch.int8), "x must be floating point"),
        (torch.zeros(16, 2).mT, "x must be contiguous along D"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hadamard(x)
