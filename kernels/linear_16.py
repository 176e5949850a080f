"""Linear layer with a dense 16-bit weight for few tokens, at the speed of the memory.

The warps of a program share the columns of some weight rows, a chunk of 64 a step, and their loads
of several steps are in flight. Sums are in float32 and in an order that the weight's shape fixes;
a token has a column of the tensor cores' result to itself. So a row's bits depend neither on the
other rows nor on their number.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import check_tensor

MAX_TOKENS = 16


class Linear16Config(NamedTuple):
    """How the work is divided. The warps fix the order of a sum: choose by the weight's shape."""

    warps: int
    """Warps of a program, which share the columns."""
    tiles: int
    """Tiles of 16 rows that a program computes."""
    stages: int
    """Steps whose loads are in flight, that of the present one included."""


@triton.jit
def linear_16_kernel(
    x,  # [M, SIZE]
    weight,  # [N, SIZE]
    bias,  # [N], or unused
    out,  # [M, N]
    tokens,
    rows,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    COLUMNS: tl.constexpr = 64
    even: tl.constexpr = SIZE % (WARPS * COLUMNS) == 0
    first_row = tl.program_id(0) * (TILES * 16)
    row = tl.arange(0, 16)
    token = tl.arange(0, 8)
    warp_column = (tl.arange(0, WARPS) * COLUMNS)[:, None, None]
    column = warp_column + tl.arange(0, COLUMNS)[None, None, :]
    sums = ()
    for _ in tl.static_range(TILES * TOKEN_TILES):
        sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    for step in tl.range(0, tl.cdiv(SIZE, WARPS * COLUMNS), num_stages=STAGES):
        k = step * (WARPS * COLUMNS) + column
        activations = ()
        for t in tl.static_range(TOKEN_TILES):
            m = (t * 8 + token)[None, :, None]
            inside = (m < tokens) & (k < SIZE)
            loaded = tl.load(x + m * SIZE + k, mask=inside, other=0)
            activations = activations + (loaded.permute(0, 2, 1),)
        updated = ()
        for i in tl.static_range(TILES):
            # Rows outside are the last one again: their results are not stored.
            n = tl.minimum(first_row + i * 16 + row, rows - 1).to(tl.int64)[None, :, None]
            if even:
                w = tl.load(weight + n * SIZE + k)
            else:
                w = tl.load(weight + n * SIZE + k, mask=k < SIZE, other=0)
            for t in tl.static_range(TOKEN_TILES):
                acc = tl.dot(w, activations[t], acc=sums[i * TOKEN_TILES + t])
                updated = updated + (acc,)
        sums = updated

    for t in tl.static_range(TOKEN_TILES):
        m = t * 8 + token
        for i in tl.static_range(TILES):
            n = first_row + i * 16 + row
            value = tl.sum(sums[i * TOKEN_TILES + t], axis=0)
            if HAS_BIAS:
                value += tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)[:, None]
            inside = (n < rows)[:, None] & (m < tokens)[None, :]
            tl.store(out + m[None, :] * rows + n[:, None], value, mask=inside)


def linear_16_config(rows: int, columns: int) -> Linear16Config:
    """By the weight's shape alone: programs of one wave where there are few rows."""
    return Linear16Config(warps=8 if columns >= 8192 else 4, tiles=1, stages=4)


def linear_16(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: Linear16Config | None = None
) -> Tensor:
    """``x @ weight.T + bias``, each row as if it were alone.

    Args:
        x: float16 or bfloat16 ``[M, K]``, M at most 16. Multiples of 8 are fastest for K.
        weight: ``[N, K]`` in the dtype of x.
        bias: ``[N]`` in the dtype of x, or None.
        config: how the work is divided, or None for :func:`linear_16_config`.

    Returns:
        ``[M, N]`` in the dtype of x.

    Raises:
        ValueError: an argument has another dtype, device or shape, or has gaps.
    """
    if x.dim() != 2 or not x.shape[0] <= MAX_TOKENS or x.shape[1] == 0:
        raise ValueError(f"x must have shape [M <= {MAX_TOKENS}, K], got {tuple(x.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape [N, K], got {tuple(weight.shape)}")
    tokens, columns = x.shape
    rows = weight.shape[0]
    check_tensor("x", x, (torch.float16, torch.bfloat16), (tokens, columns), x.device)
    check_tensor("weight", weight, (x.dtype,), (rows, columns), x.device)
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (rows,), x.device)
    config = config or linear_16_config(rows, columns)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    linear_16_kernel[(triton.cdiv(rows, config.tiles * 16),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        tokens,
        rows,
        SIZE=columns,
        HAS_BIAS=bias is not None,
        TOKEN_TILES=triton.cdiv(tokens, 8),
        TILES=config.tiles,
        WARPS=config.warps,
        STAGES=config.stages,
        num_warps=config.warps,
        enable_fp_fusion=False,
    )
    return out
