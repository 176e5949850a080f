"""The transform against a matrix in float64, and what it must never do."""

import math

import pytest
import torch
from torch import Tensor

from nestq.reference.hadamard import hadamard, hadamard_block


def matrix(size: int) -> Tensor:
    """The transform as a matrix ``[D, D]`` in float64, from signs of common bits."""
    block = hadamard_block(size)
    index = torch.arange(block)
    common = index[:, None] & index
    bits = sum(common >> bit & 1 for bit in range(block.bit_length()))
    one = (1.0 - 2.0 * (bits % 2)).double() * block**-0.5
    return torch.block_diag(*[one] * (size // block))


@pytest.mark.parametrize(("size", "block"), [(2, 2), (64, 64), (80, 16), (96, 32), (256, 256)])
def test_it_is_the_matrix_of_sylvester(size: int, block: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(3, 5, size, dtype=torch.float64)
    assert hadamard_block(size) == block
    # A sum of D products, each rounded, in an order that is not the butterfly's.
    bound = 2 * size * 2.0**-53 * (x.abs().sum(-1, keepdim=True) * block**-0.5)
    assert ((hadamard(x) - x @ matrix(size)).abs() <= bound).all()


@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_it_undoes_itself(size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(7, size)
    # log2(n) additions and a product, twice, each rounded once (float32: 2^-24), relative to the
    # norm of the vector, which bounds every entry on the way once it is scaled.
    steps = 2 * (math.log2(hadamard_block(size)) + 1)
    bound = steps * 2.0**-24 * hadamard_block(size) ** 0.5 * x.norm(dim=-1, keepdim=True)
    assert ((hadamard(hadamard(x)) - x).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 64).to(dtype)
    assert torch.equal(hadamard(x), hadamard(x.float()).to(dtype))
    assert hadamard(x).dtype == dtype


def test_one_large_entry_is_spread_evenly() -> None:
    x = torch.zeros(64)
    x[13] = 8.0
    assert torch.equal(hadamard(x).abs(), torch.ones(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_does_not_depend_on_what_is_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 3, 96).to(dtype)
    whole = hadamard(x)
    alone = torch.cat([hadamard(row[None]) for row in x])
    assert torch.equal(alone, whole)
    strided = hadamard(x.transpose(0, 1)).transpose(0, 1)
    assert torch.equal(strided, whole)


def test_no_vectors_are_no_work() -> None:
    assert hadamard(torch.zeros(2, 0, 16)).shape == (2, 0, 16)


@pytest.mark.parametrize(
    "x", [torch.tensor(1.0), torch.zeros(3, 0), torch.zeros(2, 15), torch.zeros(2, 16).int()]
)
def test_what_cannot_be_transformed_is_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"x must be floating point \[..., D\], D even"):
        hadamard(x)
