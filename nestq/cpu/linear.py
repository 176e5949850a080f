"""Linear layers on nested planes by the C++ of this folder: few tokens at a time, as in decoding.

For many tokens the reference's matrix products are as fast.
"""

import ctypes

import torch
from torch import Tensor

from nestq.cpu.library import address, threads_for
from nestq.reference.linear import ACTIVATION_LEVELS

GROUP_SIZES = (32, 64, 128)
MAX_TOKENS = 64


def can_compute(x: Tensor, group_size: int) -> bool:
    """Whether :func:`nested_linear` takes such an input."""
    tokens = x.numel() // max(x.shape[-1], 1)
    return 0 < tokens <= MAX_TOKENS and group_size in GROUP_SIZES


def nested_linear(
    library: ctypes.CDLL,
    x: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
    activation_bits: int = 8,
) -> Tensor:
    """What :func:`nestq.reference.linear.nested_linear` computes, bit for bit.

    Args:
        library: of :func:`nestq.cpu.library.library`.
        x: ``[..., K]``, up to ``MAX_TOKENS`` rows.
        base: as there.
        refinement: as there.
        scale: as there.
        bias: as there.
        group_size: one of ``GROUP_SIZES``.
        overlap: 1 to 16.
        activation_bits: 8 or 4.

    Raises:
        ValueError: shapes or dtypes do not fit, which the library could not see.
    """
    rows = base.shape[0]
    _check(x, base, refinement, scale, bias, group_size, overlap)
    if scale.dtype != torch.bfloat16:
        scale = scale.float()
    states = x.reshape(-1, x.shape[-1]).float().contiguous()
    planes = [None if plane is None else plane.contiguous() for plane in (base, refinement)]
    scale = scale.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = torch.empty(len(states), rows, dtype=torch.float32)
    library.nestq_linear(
        address(states),
        *states.shape,
        *map(address, planes),
        address(scale),
        scale.dtype == torch.bfloat16,
        address(bias),
        rows,
        group_size,
        scale.shape[1],
        overlap,
        *ACTIVATION_LEVELS[activation_bits],
        address(out),
        threads_for(out.numel() * states.shape[1]),
    )
    return out.to(x.dtype).view(*x.shape[:-1], rows)


def dequantize_base(
    library: ctypes.CDLL, base: Tensor, scale: Tensor, group_size: int, columns: int
) -> Tensor:
    """Float32 ``[N, columns]`` of a base plane, as ``nestq.reference.weights.dequantize`` has it.

    Args:
        library: of :func:`nestq.cpu.library.library`.
        base: uint8 ``[N, Kp / 2]``.
        scale: ``[N, G]``.
        group_size: one of ``GROUP_SIZES``.
        columns: without the padding.

    Raises:
        ValueError: shapes or dtypes do not fit, which the library could not see.
    """
    rows, groups = base.shape[0], -(-columns // group_size)
    plane = (rows, groups * group_size // 2)
    if base.shape != plane or base.dtype != torch.uint8:
        raise ValueError(f"base must be uint8 of shape {plane}, got {tuple(base.shape)}")
    if scale.shape != (rows, groups):
        raise ValueError(f"scale must have shape {(rows, groups)}, got {tuple(scale.shape)}")
    if scale.dtype != torch.bfloat16:
        scale = scale.float()
    base, scale = base.contiguous(), scale.contiguous()
    out = torch.empty(rows, columns, dtype=torch.float32)
    library.nestq_dequantize(
        address(base),
        address(scale),
        scale.dtype == torch.bfloat16,
        rows,
        group_size,
        groups,
        columns,
        address(out),
        threads_for(out.numel()),
    )
    return out


def _check(
    x: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
) -> None:
    rows, groups = base.shape[0], -(-x.shape[-1] // group_size)
    plane = (rows, groups * group_size // 2)
    for name, tensor in (("base", base), ("refinement", refinement)):
        if tensor is not None and (tensor.shape != plane or tensor.dtype != torch.uint8):
            raise ValueError(
                f"{name} must be uint8 of shape {plane} for an input of {x.shape[-1]} features, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if scale.shape != (rows, groups):
        raise ValueError(f"scale must have shape {(rows, groups)}, got {tuple(scale.shape)}")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias must have shape {(rows,)}, got {tuple(bias.shape)}")
    if not 1 <= overlap <= 16:
        raise ValueError(f"overlap must be from 1 to 16, got {overlap}")
