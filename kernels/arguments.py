"""What kernels refuse before they are launched, and how they say so."""

import torch
from torch import Tensor

from nestq.tensor_checks import GROUP_SIZES

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Programs that CUDA launches along the second and the third dimension of a grid, at most.
MAX_PROGRAMS = 65535


def check_tensor(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Refuse a tensor of another dtype, shape or device, or with gaps, by name."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected}, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_programs(what: str, count: int) -> None:
    """Refuse more programs than a launch can have along its second or third dimension.

    Args:
        what: they are for, such as "batch x heads".
        count: programs along that dimension.
    """
    if count > MAX_PROGRAMS:
        raise ValueError(
            f"{what} must be at most {MAX_PROGRAMS} in a call, got {count}: split the batch"
        )


def check_planes(
    base: Tensor,
    refinement: Tensor | None,
    scale_codes: Tensor,
    unit: Tensor,
    bias: Tensor | None,
    group_size: int,
    device: torch.device,
) -> None:
    """Refuse planes, scales and a bias that do not describe one weight in tiles."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GROUP_SIZES}, got {group_size!r}")
    if base.dim() != 3 or scale_codes.dim() != 3 or unit.dim() != 1:
        shapes = tuple(base.shape), tuple(scale_codes.shape), tuple(unit.shape)
        raise ValueError(
            "base, scale_codes and unit must have shapes [tiles, blocks, 512], "
            f"[tiles, groups, 16] and [N], got {shapes}"
        )
    rows, groups = unit.shape[0], scale_codes.shape[1]
    tiles, blocks = -(-rows // 16), -(-groups * group_size // 64)
    check_tensor("unit", unit, (torch.float32,), (rows,), device)
    check_tensor("scale_codes", scale_codes, (torch.int16,), (tiles, groups, 16), device)
    check_tensor("base", base, (torch.uint8,), (tiles, blocks, 512), device)
    if refinement is not None:
        check_tensor("refinement", refinement, (torch.uint8,), (tiles, blocks, 512), device)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (rows,), device)
