"""The Walsh-Hadamard transform by the C++ of this folder."""

import ctypes

import torch
from torch import Tensor

from nestq.cpu.library import address
from nestq.reference.hadamard import check_hadamard, hadamard_block


def hadamard(library: ctypes.CDLL, x: Tensor) -> Tensor:
    """What :func:`nestq.reference.hadamard.hadamard` computes, bit for bit.

    Args:
        library: of :func:`nestq.cpu.library.library`.
        x: as there, but for float64.

    Raises:
        ValueError: a dtype or a size is not as there.
    """
    check_hadamard(x)
    out = torch.empty(x.shape, dtype=torch.float32).copy_(x)
    block = hadamard_block(x.shape[-1])
    library.nestq_hadamard(address(out), x.numel() // block, block, block**-0.5)
    return out.to(x.dtype)


def can_compute(x: Tensor) -> bool:
    """Whether :func:`hadamard` can transform a tensor."""
    return x.dtype != torch.float64
