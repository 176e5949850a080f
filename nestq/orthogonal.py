"""Orthogonal matrices for `nestq.rotation`: random ones of any size, and Hadamard matrices."""

import torch
from torch import Tensor


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix drawn uniformly (Haar measure).

    Args:
        size: number of rows and columns.
        generator: source of randomness; the result lies on its device.

    Returns:
        `[size, size]`, float64.
    """
    _check_size(size)
    gaussian = torch.randn(
        size, size, generator=generator, dtype=torch.float64, device=generator.device
    )
    q, r = torch.linalg.qr(gaussian)
    # QR leaves the sign of each column to the implementation; a positive diagonal of R makes the
    # factorization unique and Q uniform (Mezzadri 2007, "How to generate random matrices from the
    # classical compact groups").
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0)
    return torch.mul(q, signs)


def hadamard(size: int, generator: torch.Generator) -> Tensor:
    """A Hadamard matrix whose rows have random signs, scaled to be orthogonal.

    It is a Kronecker product of Sylvester's matrix, of size 2^k, with the smallest one that Paley's
    constructions give for the rest of `size`.

    Args:
        size: number of rows and columns.
        generator: source of randomness; the result lies on its device.

    Returns:
        `[size, size]`, float64, entries `+-1 / sqrt(size)`.

    Raises:
        ValueError: neither construction gives a matrix of this size.
    """
    _check_size(size)
    matrix = _hadamard_signs(size).to(generator.device)
    signs = torch.randint(0, 2, (size, 1), generator=generator, device=generator.device) * 2 - 1
    return torch.div(matrix * signs, size**0.5)


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size: expected a positive integer, got {size}")


def _hadamard_signs(size: int) -> Tensor:
    """A Hadamard matrix `[size, size]` of +-1, float64."""
    core_size = size // (size & -size)  # the odd factor of size
    while (core := _paley(core_size)) is None and core_size < size:
        core_size *= 2
    if core is None:
        raise ValueError(
            f"size: no Hadamard matrix of size {size} can be constructed here (only a power of "
            "two times a size of Paley's constructions); random_orthogonal has any size"
        )
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = core
    while matrix.shape[0] < size:
        matrix = torch.kron(sylvester, matrix)
    return matrix


def _paley(size: int) -> Tensor | None:
    """Paley's Hadamard matrix of +-1 `[size, size]`, float64; None where there is none.

    Construction I has size q + 1 with a prime q = 3 mod 4, construction II has size 2 (q + 1)
    with a prime q = 1 mod 4 (Paley 1933, "On orthogonal matrices"). Size 1 is trivial.
    """
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    q = size - 1
    if q % 4 == 3 and _is_prime(q):
        return torch.eye(size, dtype=torch.float64) + _bordered_residues(q)
    q = size // 2 - 1
    if size % 2 == 0 and q % 4 == 1 and _is_prime(q):
        off_diagonal = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        identity = torch.eye(q + 1, dtype=torch.float64)
        return torch.kron(_bordered_residues(q), off_diagonal) + torch.kron(identity, diagonal)
    return None


def _bordered_residues(q: int) -> Tensor:
    """`C [q + 1, q + 1]` of zeros on the diagonal and +-1 elsewhere, with `C C^T = q I`.

    `C[1 + i, 1 + j]` says whether i - j is a square modulo the prime q. C is symmetric for
    q = 1 mod 4 and antisymmetric for q = 3 mod 4.
    """
    numbers = torch.arange(q)
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[numbers**2 % q] = 1.0
    character[0] = 0.0
    bordered = torch.ones(q + 1, q + 1, dtype=torch.float64)
    bordered[0, 0] = 0.0
    bordered[1:, 0] = 1.0 if q % 4 == 1 else -1.0
    bordered[1:, 1:] = character[(numbers[:, None] - numbers) % q]
    return bordered


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
