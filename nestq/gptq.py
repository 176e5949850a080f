"""GPTQ for nested codes: a base, then a refinement on top of the fixed base.

GPTQ (arXiv 2210.17323) rounds the columns of a weight one after the other and adds each column's
error, weighted by the inverse Hessian of the layer's inputs, to the columns that are still to be
rounded. The same sweep makes the base codes (BitNest paper, eq. 5) and, with the base held fixed,
the compensated refinement, which the paper does in closed form (eqs. 7 to 9).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nestq.reference import weights as reference

# Columns whose errors are passed on one by one; later columns get theirs in one product.
BLOCK = 128
# Fractions of the largest magnitude of a group that the scale search tries. The whole comes first:
# where no fraction is better, as in a group of inputs that were always zero, nothing is clipped.
SCALE_FRACTIONS = (1.0, *(round(0.60 + 0.04 * step, 2) for step in range(10)), 1.04)
# Weights that the search looks at together: so few stay in a CPU's cache.
SEARCH_BLOCK = 1 << 18
MAX_DAMPING = 1.0


class CalibrationError(RuntimeError):
    """What was observed during calibration cannot be used; nothing was replaced in the model."""


class Hessian:
    """Mean of ``x x^T`` over the input rows of one or more linears, float32 ``[K, K]``."""

    def __init__(self, features: int, device: torch.device) -> None:
        self.total = torch.zeros(features, features, device=device)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """Observe inputs ``[..., K]``."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.total.addmm_(rows.T, rows)
        self.rows += rows.shape[0]

    def mean(self, name: str) -> Tensor:
        """The mean, checked.

        Raises:
            CalibrationError: no row was seen, or an input was NaN or infinite.
        """
        if self.rows == 0:
            raise CalibrationError(f"{name}: no calibration row reached this layer")
        if not torch.isfinite(self.total).all():
            raise CalibrationError(f"{name}: its calibration inputs contain NaN or infinity")
        return self.total / self.rows


@dataclass(frozen=True)
class Factor:
    """What a GPTQ sweep needs of a Hessian.

    Attributes:
        upper: upper Cholesky factor of the inverse of the damped Hessian, float32 ``[K, K]``.
        diagonal: of the Hessian, the mean square of each input, float32 ``[K]``.
        damping: fraction of the mean diagonal that was added to it.
        dead_columns: number of inputs that were always zero.
    """

    upper: Tensor
    diagonal: Tensor
    damping: float
    dead_columns: int


def factorize(hessian: Tensor, damping: float, name: str = "hessian") -> Factor:
    """Invert a Hessian ``[K, K]``, damping it more (tenfold) until it is positive definite.

    A dead input gets a unit diagonal: its weights are rounded and disturb no other column.

    Args:
        hessian: ``[K, K]``, symmetric.
        damping: fraction of its mean diagonal to begin with, above 0, at most ``MAX_DAMPING``.
        name: of the layer, for the error.

    Raises:
        CalibrationError: not positive definite even with damping 1.
    """
    matrix = hessian.double()
    dead = matrix.diagonal() == 0
    mean_diagonal = matrix.diagonal().mean().item() or 1.0
    while True:
        damped = matrix.clone()
        damped.diagonal()[dead] = 1.0
        damped.diagonal().add_(damping * mean_diagonal)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed:
            return Factor(upper.float(), hessian.diagonal().float(), damping, int(dead.sum()))
        if damping >= MAX_DAMPING:
            raise CalibrationError(f"{name}: not positive definite even with damping {damping}")
        damping = min(damping * 10, MAX_DAMPING)


def search_scale(
    weight: Tensor,
    group_size: int,
    scale_dtype: torch.dtype,
    input_square: Tensor | None = None,
) -> Tensor:
    """Scale ``[N, G]`` with the least squared rounding error among ``SCALE_FRACTIONS``.

    Args:
        weight: ``[N, Kp]``, padded to whole groups.
        group_size: weights that share a scale.
        scale_dtype: storage of the scale; errors are those of the stored value.
        input_square: ``[Kp]``, weight of each input's error (the Hessian's diagonal), or None.
    """
    importance = weight.new_ones(weight.shape[-1]) if input_square is None else input_square
    importance = importance.view(-1, group_size)
    groups = weight.unflatten(-1, (-1, group_size))
    rows = max(1, SEARCH_BLOCK // weight.shape[-1])
    blocks = [_search_block(block, scale_dtype, importance) for block in groups.split(rows)]
    return reference.round_scale(torch.cat(blocks), scale_dtype)


def _search_block(groups: Tensor, scale_dtype: torch.dtype, importance: Tensor) -> Tensor:
    low, high = reference.code_range(4)
    largest = groups.abs().amax(-1) / high
    best = largest.to(scale_dtype)
    least = torch.full_like(largest, torch.inf)
    for fraction in SCALE_FRACTIONS:
        scale = (largest * fraction).to(scale_dtype)
        step = scale.to(groups.dtype).unsqueeze(-1)
        rounded = reference.divide_by_scale(groups, step).round().clamp(low, high) * step
        error = ((rounded - groups).square() * importance).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best)
    return best


def _sweep(
    weight: Tensor, factor: Factor, round_column: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> Tensor:
    """Round columns in order, compensating each error in the columns to its right.

    Args:
        weight: float32 ``[N, K]``.
        factor: of the Hessian of the K inputs.
        round_column: ``(column [N], index) -> (codes [N], value [N] that they stand for)``.

    Returns:
        Codes int8 ``[N, K]``.
    """
    # Columns are rows of the transpose: each step then reads and writes contiguous memory.
    work = weight.T.contiguous()
    codes = torch.empty_like(work, dtype=torch.int8)
    upper = factor.upper
    for start in range(0, work.shape[0], BLOCK):
        stop = min(start + BLOCK, work.shape[0])
        errors = torch.empty_like(work[start:stop])
        for index in range(start, stop):
            code, value = round_column(work[index], index)
            codes[index] = code
            error = (work[index] - value) / upper[index, index]
            errors[index - start] = error
            work[index + 1 : stop].addr_(upper[index, index + 1 : stop], error, alpha=-1)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return codes.T.contiguous()


def quantize_base(weight: Tensor, factor: Factor, scale: Tensor, group_size: int) -> Tensor:
    """Base codes int8 ``[N, K]`` by GPTQ against a given scale ``[N, G]``."""
    low, high = reference.code_range(4)
    columns_of_scale = scale.float().T.contiguous()

    def round_column(column: Tensor, index: int) -> tuple[Tensor, Tensor]:
        step = columns_of_scale[index // group_size]
        code = reference.divide_by_scale(column, step).round().clamp(low, high)
        return code, code * step

    return _sweep(weight, factor, round_column)


def quantize_refinement(
    weight: Tensor,
    base_codes: Tensor,
    factor: Factor,
    scale: Tensor,
    group_size: int,
    overlap: int,
) -> tuple[Tensor, float]:
    """Compensated refinement: a GPTQ sweep over q_r with base and scale fixed.

    Args:
        weight: float32 ``[N, K]``, the weight that the base was made from.
        base_codes: int8 ``[N, K]``; never changed.
        factor: of the Hessian of the K inputs.
        scale: ``[N, G]`` as stored.
        group_size: weights that share a scale.
        overlap: target steps in a base step.

    Returns:
        Refinement codes int8 ``[N, K]`` and the fraction of them that was clipped.
    """
    columns_of_scale = scale.float().T.contiguous()
    lowest, high = reference.refinement_bounds(base_codes, overlap)
    columns_of_base = base_codes.T.float().contiguous()
    columns_of_lowest = lowest.T.float().contiguous()
    clipped = torch.zeros((), dtype=torch.int64, device=weight.device)

    def round_column(column: Tensor, index: int) -> tuple[Tensor, Tensor]:
        step = columns_of_scale[index // group_size]
        base = columns_of_base[index]
        ideal = ((reference.divide_by_scale(column, step) - base) * overlap).round()
        code = torch.maximum(ideal.clamp(max=high), columns_of_lowest[index])
        clipped.add_((code != ideal).sum())
        return code, (base * overlap + code) * step / overlap

    codes = _sweep(weight, factor, round_column)
    return codes, int(clipped) / codes.numel()
