"""What a nested weight refuses, before anything is done, and how it says so."""

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nestq.argument_checks import check_int
from nestq.reference import weights as reference

GROUP_SIZES = (32, 64, 128)
ACTIVATION_BITS = (4, 8, 16)
MAX_OVERLAP = 16
# Composed codes reach 128 times a scale that is 1/7 of the largest weight: float32 must hold that.
MAX_MAGNITUDE = 2.0**120


def check_options(group_size: object, overlap: object) -> None:
    """Refuse options that the storage format cannot hold."""
    # 64.0 equals 64, but nothing can be reshaped by it.
    if not isinstance(group_size, int) or group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GROUP_SIZES}, got {group_size!r}")
    check_int("overlap", overlap, 1, MAX_OVERLAP)


def check_four_bit_options(
    group_size: int,
    in_features: int,
    draft_bits: int,
    target_bits: int | None,
    input_rotation: int,
) -> None:
    """Refuse options that a ``FourBitTensor`` cannot have, by name."""
    check_options(group_size, 1)
    for name, bits in (("draft_bits", draft_bits), ("target_bits", target_bits)):
        if bits not in ACTIVATION_BITS and not (bits is None and name == "target_bits"):
            raise ValueError(f"{name} must be one of {ACTIVATION_BITS}, got {bits!r}")
    check_int("input_rotation", input_rotation, 0)
    is_power = input_rotation & (input_rotation - 1) == 0
    if input_rotation and (not is_power or input_rotation == 1 or in_features % input_rotation):
        raise ValueError(
            "input_rotation must be 0 or a power of two, at least 2, that divides the "
            f"{in_features} input features, got {input_rotation}"
        )


def check_weight(weight: Tensor, name: str = "weight") -> None:
    """Refuse a weight that cannot be quantized, by name."""
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(
            f"{name} must be a non-empty 2-D floating-point tensor, "
            f"got shape {tuple(weight.shape)} of {weight.dtype}"
        )
    largest = weight.detach().float().abs().amax().item()
    if not largest <= MAX_MAGNITUDE:
        raise ValueError(
            f"{name} must be finite and at most 2**120 in magnitude, the largest is {largest}"
        )


def check_codes(name: str, codes: Tensor) -> None:
    """Refuse codes that are not int8 or leave their 4 bits, by name."""
    low, high = reference.code_range(4)
    if codes.dtype != torch.int8:
        raise ValueError(f"{name} must be int8, got {codes.dtype}")
    if codes.numel() and (codes.min() < low or codes.max() > high):
        raise ValueError(
            f"{name} must be in [{low}, {high}], got [{codes.min().item()}, {codes.max().item()}]"
        )


def check_composed(base_codes: Tensor, refinement_codes: Tensor, overlap: int) -> None:
    """Refuse refinement codes with which a composed code would leave int8."""
    smallest, _ = reference.refinement_bounds(base_codes, overlap)
    if (refinement_codes < smallest).any():
        raise ValueError(
            "refinement_codes must keep overlap * base + refinement in int8: with overlap "
            f"{overlap} a base code of -8 leaves no room below {smallest.max().item()}"
        )


def check_scale(name: str, scale: Tensor) -> None:
    """Refuse scales that linear layers cannot hold as they are, by name.

    Reads the values, where there are any: a meta tensor or a traced one is let through.

    Args:
        name: of the scale, for the error.
        scale: floating point ``[N, G]``.

    Raises:
        ValueError: a scale is negative, infinite or NaN, or not exact in fixed point
            (:func:`nestq.reference.weights.fixed_point_scale`).
    """
    if scale.is_meta or isinstance(scale, FakeTensor) or not scale.numel():
        return
    low, high = scale.aminmax()
    if not (low >= 0 and high < inf):  # NaN is both extremes, and neither holds
        raise ValueError(
            f"{name} must be finite and not negative, found {low.item()} to {high.item()}"
        )
    exact = reference.round_scale(scale, scale.dtype)
    if not torch.equal(exact, scale):
        row, group = (exact != scale).nonzero()[0].tolist()
        raise ValueError(
            f"{name} must be exact in fixed point, integers up to 32767 times a power of two for "
            f"each row, got {scale[row, group].item()} in row {row}, group {group}, where the "
            f"largest is {scale[row].max().item()}: choose codes for scales that "
            "nestq.reference.weights.round_scale gave"
        )


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that is not of floating point, by name."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name} must be a floating-point dtype, got {dtype}")


def check_one_device(tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors of one weight that lie on several devices, by name."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{', '.join(devices)} must be on one device, got {places}")


def check_canonical_planes(
    base: Tensor,
    scale: Tensor,
    group_size: int,
    overlap: int,
    in_features: int,
    hp_dtype: torch.dtype,
    refinement: Tensor | None,
) -> None:
    """Refuse planes, scale and options that do not belong together, by name."""
    check_options(group_size, overlap)
    groups = -(-in_features // group_size)
    plane_shape = (base.shape[0], groups * group_size // 2)
    for name, plane in (("base", base), ("refinement", refinement)):
        if plane is not None and (tuple(plane.shape) != plane_shape or plane.dtype != torch.uint8):
            raise ValueError(
                f"{name} must be uint8 of shape {plane_shape} for {in_features} input features in "
                f"groups of {group_size}, got {plane.dtype} of shape {tuple(plane.shape)}"
            )
    if tuple(scale.shape) != (base.shape[0], groups) or not scale.is_floating_point():
        raise ValueError(
            f"scale must be floating point of shape {(base.shape[0], groups)}, "
            f"got {scale.dtype} of shape {tuple(scale.shape)}"
        )
    check_one_device({"base": base, "scale": scale, "refinement": refinement})
    check_float_dtype("hp_dtype", hp_dtype)
