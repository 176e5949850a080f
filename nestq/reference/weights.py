"""Nested weight codes: packing, quantization, refinement, composition (BitNest paper, A.1).

A weight ``W[N, K]`` is cut along K into groups of ``group_size``; K is padded with zero codes to
whole groups, so ``Kp = G * group_size``. The base holds ``q`` with ``draft = q * s``; the
refinement holds ``q_r`` with ``target = (overlap * q + q_r) * s / overlap``. The paper has
``overlap = 16``; a smaller one lets the refinement reach further than half a base step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NIBBLE_BIAS = 8
SCALE_BITS = 15
# The exponent below which a row's unit would leave the normal float32 numbers.
SMALLEST_EXPONENT = -111


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest two's complement code of ``bits`` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def pad_to_groups(x: Tensor, group_size: int) -> Tensor:
    """Pad the last dimension with zeros to a whole number of groups."""
    return F.pad(x, (0, -x.shape[-1] % group_size))


def pack_nibbles(nibbles: Tensor, group_size: int) -> Tensor:
    """Pack unsigned nibbles ``[..., Kp]`` so that byte j of a group holds codes j and j + g/2."""
    low, high = nibbles.unflatten(-1, (-1, 2, group_size // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def unpack_nibbles(plane: Tensor, group_size: int) -> Tensor:
    """Inverse of :func:`pack_nibbles`: uint8 ``[..., Kp / 2]`` to nibbles uint8 ``[..., Kp]``."""
    halves = plane.unflatten(-1, (-1, group_size // 2))
    return torch.cat((halves & 0x0F, halves >> 4), dim=-1).flatten(-2)


def pack_base(codes: Tensor, group_size: int) -> Tensor:
    """Pack base codes int8 ``[..., Kp]`` in [-8, 7] as two's complement nibbles, two a byte."""
    return pack_nibbles(codes.view(torch.uint8) & 0x0F, group_size)


def unpack_base(plane: Tensor, group_size: int) -> Tensor:
    """Base codes int8 ``[..., Kp]`` of a packed plane uint8 ``[..., Kp / 2]``."""
    return (unpack_nibbles(plane, group_size) << 4).view(torch.int8) >> 4


def pack_refinement(codes: Tensor, group_size: int) -> Tensor:
    """Pack refinement codes int8 ``[..., Kp]`` in [-8, 7] as ``q_r + 8``, two a byte."""
    return pack_nibbles((codes + NIBBLE_BIAS).view(torch.uint8), group_size)


def unpack_refinement(plane: Tensor, group_size: int) -> Tensor:
    """Refinement codes int8 ``[..., Kp]`` of a packed plane uint8 ``[..., Kp / 2]``."""
    return unpack_nibbles(plane, group_size).view(torch.int8) - NIBBLE_BIAS


def compose(base_codes: Tensor, refinement_codes: Tensor, overlap: int) -> Tensor:
    """Integer code of the target, ``overlap * q + q_r``, as int8."""
    return base_codes * overlap + refinement_codes


def expand_scale(scale: Tensor, group_size: int) -> Tensor:
    """Repeat a scale ``[N, G]`` over its groups: ``[N, G * group_size]``."""
    return scale.repeat_interleave(group_size, dim=-1)


def divide(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor`` with the same bits on every device.

    By a plain number, PyTorch divides on a CPU and multiplies with the reciprocal on a GPU.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def absmax_scale(weight: Tensor, group_size: int, bits: int, scale_dtype: torch.dtype) -> Tensor:
    """Scale ``[N, G]`` that maps the largest magnitude of a group to the largest positive code.

    Args:
        weight: ``[N, Kp]`` floating point, already padded to whole groups.
        group_size: weights that share a scale.
        bits: of the codes.
        scale_dtype: of the result.
    """
    largest = weight.unflatten(-1, (-1, group_size)).abs().amax(-1)
    return divide(largest, code_range(bits)[1]).to(scale_dtype)


def fixed_point_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales ``[N, G]`` as integers times a power of two that the row shares.

    This is how linear layers read scales. A bfloat16 scale is represented exactly unless it is over
    128 times smaller than the largest of its row; any scale is off by at most ``2 ** -15`` of that
    largest one. Scales that went through :func:`round_scale` are exact.

    Returns:
        int16 ``[N, G]`` in [0, 32767] and float32 ``[N]``, NaN for a row with a scale that is not
        finite.
    """
    scale = scale.float()
    largest = scale.amax(-1)
    exponent = torch.frexp(largest).exponent.clamp(min=SMALLEST_EXPONENT) - SCALE_BITS
    unit = ((exponent + 127) << 23).view(torch.float32)  # 2 ** exponent, bit by bit
    codes = (scale / unit[:, None]).round().clamp(max=(1 << SCALE_BITS) - 1)
    return codes.to(torch.int16), torch.where(torch.isfinite(largest), unit, torch.nan)


def round_scale(scale: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Scales ``[N, G]`` as they are stored: in ``scale_dtype``, and exact in fixed point."""
    stored = scale.to(scale_dtype)
    codes, unit = fixed_point_scale(stored)
    exact = (codes * unit[:, None]).to(scale_dtype)
    return torch.where(torch.isfinite(stored).all(-1, keepdim=True), exact, stored)


def divide_by_scale(weight: Tensor, scale: Tensor) -> Tensor:
    """``weight / scale`` where a zero scale stands for a group of zero codes."""
    return torch.where(scale > 0, weight / torch.where(scale > 0, scale, 1), 0)


def round_to_base(weight: Tensor, scale: Tensor, group_size: int, bits: int = 4) -> Tensor:
    """Nearest base codes (paper eq. 5 without GPTQ), int8 ``[N, Kp]``.

    The codes are chosen against the stored scale: pass it after rounding to its storage dtype.
    """
    low, high = code_range(bits)
    expanded = expand_scale(scale.to(weight.dtype), group_size)
    return divide_by_scale(weight, expanded).round().clamp(low, high).to(torch.int8)


def refinement_bounds(
    base_codes: Tensor, overlap: int, bits: int = 4, refinement_bits: int = 4
) -> tuple[Tensor, int]:
    """Smallest (per code) and largest refinement code.

    The composed code must stay in ``bits + refinement_bits`` signed bits. With overlap 16 this is
    the paper's rule that q_r >= 0 where q = -8 (eq. 9); for a small overlap it never binds.
    """
    low, high = code_range(refinement_bits)
    smallest_composed = code_range(bits + refinement_bits)[0]
    bound = smallest_composed - base_codes.to(torch.int32) * overlap
    return bound.clamp(min=low).to(torch.int8), high


def refine(
    weight: Tensor,
    base_codes: Tensor,
    scale: Tensor,
    group_size: int,
    overlap: int,
    bits: int = 4,
    refinement_bits: int = 4,
) -> tuple[Tensor, Tensor]:
    """Closed-form refinement (paper eqs. 7 to 9, with ``s / overlap`` for ``s / 16``).

    Args:
        weight: ``[N, Kp]``, the weight that the base was made from.
        base_codes: int8 ``[N, Kp]``; never changed.
        scale: ``[N, G]`` as stored.
        group_size: weights that share a scale.
        overlap: target steps in a base step.
        bits: of the base codes.
        refinement_bits: of the refinement codes.

    Returns:
        Refinement codes int8 ``[N, Kp]`` and a bool mask ``[N, Kp]`` of those that were clipped.
    """
    expanded = expand_scale(scale.to(weight.dtype), group_size)
    residual = weight - base_codes.to(weight.dtype) * expanded
    ideal = (divide_by_scale(residual, expanded) * overlap).round()
    low, high = refinement_bounds(base_codes, overlap, bits, refinement_bits)
    codes = torch.minimum(torch.maximum(ideal, low.to(ideal.dtype)), ideal.new_tensor(high))
    return codes.to(torch.int8), codes != ideal


def dequantize(
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    group_size: int,
    overlap: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dense weight ``[N, in_features]``: the target's, or the draft's where refinement is None.

    Args:
        base: uint8 ``[N, Kp / 2]``.
        refinement: uint8 ``[N, Kp / 2]`` or None.
        scale: ``[N, G]``.
        group_size: weights that share a scale.
        overlap: target steps in a base step.
        in_features: columns without the padding.
        dtype: of the result; the arithmetic is in float64 where asked for, else in float32.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    codes = unpack_base(base, group_size)
    divisor = 1
    if refinement is not None:
        codes = compose(codes, unpack_refinement(refinement, group_size), overlap)
        divisor = overlap
    dense = divide(codes.to(compute) * expand_scale(scale.to(compute), group_size), divisor)
    return dense[..., :in_features].to(dtype)
