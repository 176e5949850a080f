"""The normalized Walsh-Hadamard transform of vectors.

The matrix is Sylvester's, scaled to be orthogonal. It is symmetric: the transform undoes itself::

    H_1 = [1]        H_2n = [[H_n, H_n], [H_n, -H_n]]        y = H_n x / sqrt(n)

One large entry of x becomes n entries of ``1 / sqrt(n)`` of its size. Vectors whose size D is no
power of two are cut into blocks of the largest power of two that divides D (80 into 16, 96 into
32), and each is transformed on its own.
"""

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """Transform the last dimension; every vector gets the same bits whatever is beside it.

    Sums are a butterfly of ``log2(n)`` steps, elementwise, in float32 (float64 for float64); the
    last one is scaled and rounded to the dtype of x.

    Args:
        x: floating point ``[..., D]``, D even.

    Returns:
        The transform, in the dtype of x, contiguous ``[..., D]``.

    Raises:
        ValueError: a dtype or a size is not as above.
    """
    check_hadamard(x)
    block = hadamard_block(x.shape[-1])
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = x.to(dtype)
    half = 1
    while half < block:
        pairs = sums.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half)
        first, second = pairs.unbind(-2)
        sums = torch.stack((first + second, first - second), dim=-2)
        half *= 2
    return (sums * block**-0.5).to(x.dtype).reshape(x.shape)


def hadamard_block(size: int) -> int:
    """Numbers that are transformed together: the largest power of two that divides a size."""
    return size & -size


def check_hadamard(x: Tensor) -> None:
    """Refuse what :func:`hadamard` cannot transform."""
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] % 2 or x.shape[-1] == 0:
        raise ValueError(
            "x must be floating point [..., D], D even and at least 2, "
            f"got {x.dtype} of shape {tuple(x.shape)}"
        )
