"""``nestq::fused_linear`` on a GPU: activations are computed and quantized once for all weights."""

from typing import Any

import torch
from torch import Tensor

from nestq.kernels.act_quant import act_quant
from nestq.kernels.arguments import check_tensor
from nestq.kernels.dual_plane_linear import MAX_TOKENS
from nestq.kernels.linear import TiledWeight, as_rows, checked_weight, multiply
from nestq.neighbours import merged
from nestq.tile_layout import TILE_ROWS


def fused_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
    bases: list[Tensor],
    refinements: list[Tensor],
    scales: list[Tensor],
    units: list[Tensor],
    biases: list[Tensor | None],
    group_size: int,
    overlap: int,
) -> tuple[Tensor, Tensor]:
    """``norm(x + residual)`` or ``silu(gate) * x``, times one or more weights.

    One kernel makes INT8 activations of the input, and one multiplies them by all weights if their
    planes are neighbours in memory; else there is one for each weight.

    Args:
        x: ``[..., K]`` float16, bfloat16 or float32.
        residual: as x, to add first, or None.
        norm_weight: ``[K]`` of an RMSNorm, in the dtype of x, or None.
        eps: of the norm.
        gate: as x, or None; not together with a residual or a norm.
        bases: uint8 ``[ceil(N / 16), blocks, 512]`` of each weight.
        refinements: the same, or nothing for the draft's weights.
        scales: int16 ``[ceil(N / 16), G, 16]`` of each weight, in units of their row.
        units: float32 ``[N]`` of each weight.
        biases: ``[N]`` or None of each weight.
        group_size: codes that share a scale.
        overlap: base steps are divided in this many target steps.

    Returns:
        ``[..., sum of N]`` in the dtype of x, the results side by side; and ``x + residual``, or an
        empty tensor where there is no residual.

    Raises:
        ValueError: an argument has another dtype, device or shape, or is not there for each weight.
    """
    planes = _planes(bases, refinements, scales, units, biases)
    weights = [checked_weight(x, *one, group_size, overlap) for one in planes]
    _check_input(x, residual, norm_weight, gate)
    rows = as_rows(x)
    tokens = rows.shape[0]
    shape = *x.shape[:-1], sum(weight.unit.shape[0] for weight in weights)
    if tokens == 0:
        return x.new_empty(shape), x.new_empty(0 if residual is None else x.shape)
    codes, sums, step, total = act_quant(
        rows,
        group_size,
        None if residual is None else as_rows(residual),
        norm_weight,
        eps,
        None if gate is None else as_rows(gate),
        in_rows=tokens > MAX_TOKENS,
    )
    parts = [
        multiply(codes, sums, step, tokens, weight, group_size, overlap, x.dtype)
        for weight in _merged_weights(weights)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out.view(shape), x.new_empty(0) if residual is None else total.view(x.shape)


def _planes(
    bases: list[Tensor],
    refinements: list[Tensor],
    scales: list[Tensor],
    units: list[Tensor],
    biases: list[Tensor | None],
) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]]:
    """Base, refinement, scale, unit and bias of each weight."""
    count = len(bases)
    if count == 0:
        raise ValueError("bases must have at least one weight, got none")
    lengths = {
        "refinements": len(refinements) or count,
        "scales": len(scales),
        "units": len(units) or count,
        "biases": len(biases),
    }
    for name, length in lengths.items():
        if length != count:
            raise ValueError(f"{name} must have an entry for each of {count} bases, got {length}")
    none: list[None] = [None] * count
    return list(zip(bases, refinements or none, scales, units or none, biases, strict=True))


def _check_input(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, gate: Tensor | None
) -> None:
    if gate is not None and (residual is not None or norm_weight is not None):
        raise ValueError("gate must be None where there is a residual or a norm_weight")
    for name, other in (("residual", residual), ("gate", gate)):
        if other is not None and (other.shape, other.dtype, other.device) != (
            x.shape,
            x.dtype,
            x.device,
        ):
            raise ValueError(
                f"{name} must be {x.dtype} of shape {tuple(x.shape)} on {x.device} as x is, "
                f"got {other.dtype} of shape {tuple(other.shape)} on {other.device}"
            )
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (x.dtype,), (x.shape[-1],), x.device)


def _merged_weights(weights: list[TiledWeight]) -> list[TiledWeight]:
    """One weight of all rows if planes are neighbours and no tile has rows of two; or the same."""
    if len(weights) == 1 or any(weight.unit.shape[0] % TILE_ROWS for weight in weights[:-1]):
        return weights
    together: list[Any] = []
    for planes in zip(*weights, strict=True):
        given = [plane for plane in planes if plane is not None]
        whole = merged(given) if len(given) == len(planes) else None
        if given and whole is None:
            return weights
        together.append(whole)
    return [TiledWeight(*together)]
