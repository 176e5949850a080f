from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestq.orthogonal import hadamard, random_orthogonal

# Rounding of a product of `size` terms, with a margin for the factorization.
EPSILON = torch.finfo(torch.float64).eps


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonality_error(matrix: torch.Tensor) -> float:
    identity = torch.eye(matrix.shape[0], dtype=torch.float64)
    return max(
        (matrix.T @ matrix - identity).abs().max().item(),
        (matrix @ matrix.T - identity).abs().max().item(),
    )


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 80), seed=st.integers(0, 2**32))
def test_random_orthogonal_is_orthogonal_and_follows_its_seed(size: int, seed: int) -> None:
    matrix = random_orthogonal(size, generator(seed))

    assert matrix.shape == (size, size)
    assert matrix.dtype == torch.float64
    assert orthogonality_error(matrix) < 10 * size * EPSILON
    assert torch.equal(matrix, random_orthogonal(size, generator(seed)))


def test_random_orthogonal_is_uniform() -> None:
    # The trace of a Haar matrix has mean 0 and variance 1. A QR factor without the sign fix has a
    # diagonal that is mostly of one sign. 4 standard errors of the mean of 400 draws are 0.2.
    source = generator()
    traces = torch.stack([random_orthogonal(6, source).trace() for _ in range(400)])

    assert traces.mean().abs() < 0.2
    assert abs(traces.var().item() - 1.0) < 0.3


# Sylvester; Paley I (12, 20, 24, 80 = 20 * 4); Paley II (28, 36, 576 = 36 * 16, 148).
@pytest.mark.parametrize("size", [1, 2, 4, 64, 12, 20, 24, 80, 96, 28, 36, 48, 148, 576])
def test_hadamard_has_equal_magnitudes_and_orthogonal_rows(size: int) -> None:
    matrix = hadamard(size, generator())

    assert matrix.dtype == torch.float64
    signs = matrix.sign()
    # Products of signs are exact.
    assert torch.equal(signs @ signs.T, size * torch.eye(size, dtype=torch.float64))
    assert torch.equal(matrix, signs / size**0.5)
    assert orthogonality_error(matrix) < size * EPSILON


@pytest.mark.parametrize("size", [896, 1536, 2560, 3072, 3584, 4096])
def test_hadamard_exists_for_the_widths_of_known_models(size: int) -> None:
    signs = hadamard(size, generator()).sign().float()

    # Sums of up to 2^24 ones are exact in float32.
    assert torch.equal(signs @ signs.T, size * torch.eye(size))


def test_hadamard_signs_are_random() -> None:
    first, second = hadamard(64, generator(0)), hadamard(64, generator(1))

    assert torch.equal(first, hadamard(64, generator(0)))
    flipped = (first != second).any(dim=1)
    assert torch.equal(first.abs(), second.abs())
    assert torch.equal(first[flipped], -second[flipped])
    assert 16 < flipped.sum() < 48  # 4 standard deviations around 32


@pytest.mark.parametrize("size", [3, 6, 7, 18, 92, 172])
def test_hadamard_refuses_a_size_it_cannot_construct(size: int) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix of size {size}"):
        hadamard(size, generator())


@pytest.mark.parametrize("size", [0, -4])
@pytest.mark.parametrize("draw", [hadamard, random_orthogonal])
def test_refuses_a_size_that_is_not_positive(
    draw: Callable[[int, torch.Generator], torch.Tensor], size: int
) -> None:
    with pytest.raises(ValueError, match=f"expected a positive integer, got {size}"):
        draw(size, generator())
