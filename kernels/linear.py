"""Linear layers on a GPU: ``nestq::dual_plane_linear``, ``base_linear`` and ``linear_16``."""

from typing import NamedTuple

import torch
from torch import Tensor

from nestq.kernels.act_quant import act_quant
from nestq.kernels.arguments import FLOATS, check_planes
from nestq.kernels.base_linear_16 import MAX_TOKENS as MAX_BASE_TOKENS
from nestq.kernels.base_linear_16 import base_linear_16
from nestq.kernels.dual_plane_linear import MAX_TOKENS, dual_plane_linear
from nestq.kernels.linear_16 import MAX_TOKENS as MAX_DENSE_TOKENS
from nestq.kernels.linear_16 import linear_16
from nestq.kernels.prefill_linear import prefill_linear
from nestq.reference import linear as reference
from nestq.tile_layout import canonical_planes


class TiledWeight(NamedTuple):
    """A weight ``[N, K]`` as the kernels read it."""

    base: Tensor
    """uint8 ``[ceil(N / 16), blocks, 512]``."""
    refinement: Tensor | None
    """The same, or None for the draft's weight."""
    scale: Tensor
    """int16 ``[ceil(N / 16), G, 16]``, in units of their row."""
    unit: Tensor
    """float32 ``[N]``."""
    bias: Tensor | None
    """``[N]``."""


def linear(
    x: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    unit: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
) -> Tensor:
    """``x @ W.T + bias``: quantize the activations to INT8, then multiply by the planes in tiles.

    Args:
        x: ``[..., K]`` float16, bfloat16 or float32.
        base: as in :class:`TiledWeight`, and so are the next four.
        refinement: or None for the draft's weight.
        scale: in units of their row.
        unit: of each row.
        bias: or None.
        group_size: codes that share a scale.
        overlap: base steps are divided in this many target steps.

    Returns:
        ``[..., N]`` in the dtype of x.

    Raises:
        ValueError: an argument has another dtype, device or shape.
    """
    weight = checked_weight(x, base, refinement, scale, unit, bias, group_size, overlap)
    return _integer_linear(x, weight, group_size, overlap, bits=8)


def _integer_linear(
    x: Tensor, weight: TiledWeight, group_size: int, overlap: int, bits: int
) -> Tensor:
    """Quantize activations to some bits, and multiply."""
    rows = as_rows(x)
    tokens = rows.shape[0]
    shape = *x.shape[:-1], weight.unit.shape[0]
    if tokens == 0:
        return x.new_empty(shape)
    codes, sums, step, _ = act_quant(rows, group_size, in_rows=tokens > MAX_TOKENS, bits=bits)
    return multiply(codes, sums, step, tokens, weight, group_size, overlap, x.dtype).view(shape)


def base_linear(
    x: Tensor,
    base: Tensor,
    scale: Tensor,
    unit: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    activation_bits: int,
) -> Tensor:
    """``x @ W.T + bias`` of a base plane; a row's bits do not depend on the other rows.

    With 4 bits the kernels of :func:`linear` multiply INT4 activations, which have a byte each.
    With 16 bits the weight is read once for each 16 tokens, and in float32, for which there is no
    kernel, the reference computes on the plane in the order of files.

    Args:
        x: ``[..., K]`` float16, bfloat16 or float32.
        base: as in :class:`TiledWeight`, and so are the next three.
        scale: in units of their row.
        unit: of each row.
        bias: or None.
        group_size: codes that share a scale.
        activation_bits: 4 or 16.

    Returns:
        ``[..., N]`` in the dtype of x.

    Raises:
        ValueError: an argument has another dtype, device, shape or value.
    """
    weight = checked_weight(x, base, None, scale, unit, bias, group_size, overlap=1)
    if activation_bits == 4:
        return _integer_linear(x, weight, group_size, overlap=1, bits=4)
    if activation_bits != 16:
        raise ValueError(f"activation_bits must be 4 or 16, got {activation_bits}")
    if x.dtype == torch.float32:
        base, _, scale = canonical_planes(base, None, scale, weight.unit, group_size)
        return reference.base_linear(x, base, scale, bias, group_size, activation_bits)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    arguments = weight.base, weight.scale, weight.unit, bias, group_size
    parts = [base_linear_16(part, *arguments) for part in rows.split(MAX_BASE_TOKENS)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(*x.shape[:-1], weight.unit.shape[0])


def checked_weight(
    x: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    unit: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
) -> TiledWeight:
    """The weight, if kernels can multiply x by it.

    Raises:
        ValueError: an argument has another dtype, device or shape.
    """
    if unit is None:
        raise ValueError(
            "base must lie in tiles on a GPU, got planes in the order of files: call "
            "weight.in_order_of_device()"
        )
    check_planes(base, refinement, scale, unit, bias, group_size, x.device)
    if x.dtype not in FLOATS:
        raise ValueError(f"x must be float16, bfloat16 or float32, got {x.dtype}")
    if not 1 <= overlap <= 16:
        raise ValueError(f"overlap must be from 1 to 16, got {overlap!r}")
    groups = -(-x.shape[-1] // group_size)
    if groups != scale.shape[1]:
        raise ValueError(
            f"x must have as many columns as the weight, {scale.shape[1]} groups of {group_size}, "
            f"got shape {tuple(x.shape)}"
        )
    return TiledWeight(base, refinement, scale, unit, bias)


def as_rows(x: Tensor) -> Tensor:
    """``[..., K]`` to ``[M, K]`` with neighbouring columns, without a copy where that is so."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def multiply(
    codes: Tensor,
    sums: Tensor,
    step: Tensor,
    tokens: int,
    weight: TiledWeight,
    group_size: int,
    overlap: int,
    dtype: torch.dtype,
) -> Tensor:
    """``[tokens, N]`` in a dtype, of what ``act_quant`` made of the activations.

    Args:
        codes: in rows if there are more than ``MAX_TOKENS`` tokens, else in tiles.
        sums: of the codes.
        step: scales of the tokens.
        tokens: M, at least one.
        weight: to multiply by.
        group_size: codes that share a scale.
        overlap: base steps are divided in this many target steps.
        dtype: of the result.
    """
    out = torch.empty(tokens, weight.unit.shape[0], dtype=dtype, device=codes.device)
    if tokens > MAX_TOKENS:
        prefill_linear(codes, step[:tokens], *weight, group_size, overlap, out)
    else:
        dual_plane_linear(codes, sums, step, *weight, group_size, overlap, out)
    return out


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of a dense weight; a row's bits do not depend on the other rows.

    It reads the weight once for each 16 tokens.

    Args:
        x: ``[..., K]`` float16, bfloat16 or float32.
        weight: ``[N, K]``, in the dtype of x.
        bias: ``[N]`` or None.
    """
    if x.dtype not in FLOATS:
        raise ValueError(f"x must be float16, bfloat16 or float32, got {x.dtype}")
    if x.dtype == torch.float32:
        # There is no kernel: the reference calls a matrix product for each row.
        return reference.linear_16(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    parts = [linear_16(part, weight, bias) for part in rows.split(MAX_DENSE_TOKENS)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(*x.shape[:-1], weight.shape[0])
