"""Writing into a nested KV cache by the C++ of this folder."""

import ctypes

from torch import Tensor

from nestq.cpu.library import address
from nestq.reference.kv import check_append


def kv_append(
    library: ctypes.CDLL,
    states: Tensor,
    positions: Tensor,
    base: Tensor,
    refinement: Tensor,
    scale: Tensor,
) -> None:
    """What :func:`nestq.reference.kv.kv_append` does, bit for bit.

    Args:
        library: of :func:`nestq.cpu.library.library`.
        states: as there.
        positions: as there.
        base: as there, contiguous.
        refinement: as there, contiguous.
        scale: as there, contiguous.

    Raises:
        ValueError: a shape does not fit, or a position is not below S.
    """
    check_append(states, positions, base, refinement, scale)
    states = states.float().contiguous()
    positions = positions.contiguous()
    library.nestq_kv_append(
        address(states),
        address(positions),
        *states.shape,
        base.shape[2],
        *map(address, (base, refinement, scale)),
    )


def can_append(*planes: Tensor) -> bool:
    """Whether :func:`kv_append` can write into planes."""
    return all(plane.is_contiguous() for plane in planes)
