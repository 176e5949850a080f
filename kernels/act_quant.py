"""Per-token INT8 quantization of activations, alone or fused with what comes just before it.

One program reads a token once and writes its codes in the tiles that ``dual_plane_linear`` reads,
its scale, and the sums of its codes that pay for the offset of composed weight codes. Fused forms
round to the dtype of the activations where the layers that they replace do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.rounding import round_half_even
from nestq.reference import linear as reference
from nestq.tile_layout import BLOCK, TILE_BYTES, TILE_TOKENS

SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)


@triton.jit
def _rms_norm(x, weight, columns, size, eps, dtype: tl.constexpr):
    mean = tl.sum(x * x, axis=0) / size
    normed = (x * tl.rsqrt(mean + eps)).to(dtype)
    w = tl.load(weight + columns, mask=columns < size, other=0)
    return (normed * w).to(dtype).to(tl.float32)


@triton.jit
def act_quant_kernel(
    x,  # [M, K]
    other,  # residual or gate [M, K], or unused
    norm_weight,  # [K], or unused
    total,  # [M, K] x + residual, or unused
    codes,  # int8 [T, blocks, 512], or [M, blocks * 64] in rows
    sums,  # int32 [T, blocks * 64 / SUM_WIDTH, 8], or unused in rows
    scale,  # float32 [T * 8]
    size,
    blocks,
    eps,
    x_stride,
    other_stride,
    COLUMNS: tl.constexpr,
    SUM_WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    IN_ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < size
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + token * x_stride + column, mask=inside, other=0)
    if ADD:
        value += tl.load(other + token * other_stride + column, mask=inside, other=0)
        tl.store(total + token * size + column, value, mask=inside)
    value = value.to(tl.float32)
    if GATE:
        gate = tl.load(other + token * other_stride + column, mask=inside, other=0).to(tl.float32)
        activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
        value = (activated * value).to(dtype).to(tl.float32)
    if NORM:
        value = _rms_norm(value, norm_weight, column, size, eps, dtype)

    # As integers, so that NaN is the largest of all and the token's result is NaN too.
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    step = tl.div_rn(tl.max(magnitude, axis=0).to(tl.float32, bitcast=True), 127.0)
    inverse = tl.div_rn(1.0, tl.where(step > SMALLEST_SCALE, step, 1.0))
    rounded = round_half_even(value * inverse)
    code = tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)

    block = column // 64
    if IN_ROWS:
        place = column // 32 * 32 + column % 8 // 4 * 16 + column % 32 // 8 * 4 + column % 4
        tl.store(codes + token * blocks * 64 + place, code, mask=block < blocks)
    else:
        tile = token // 8
        row = token % 8
        place = column % 32 // 8 * 16 + column % 64 // 32 * 8 + column % 8
        at = (tile * blocks + block) * 512 + row * 64 + place
        tl.store(codes + at, code, mask=block < blocks)
        part_sums = tl.sum(code.to(tl.int32).reshape(COLUMNS // SUM_WIDTH, SUM_WIDTH), axis=1)
        part = tl.arange(0, COLUMNS // SUM_WIDTH)
        parts = blocks * (64 // SUM_WIDTH)
        tl.store(sums + (tile * parts + part) * 8 + row, part_sums, mask=part < parts)
    tl.store(scale + token, step)


def act_quant(
    x: Tensor,
    group_size: int = BLOCK,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: Tensor | None = None,
    in_rows: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize tokens; optionally ``norm(x + residual)`` or ``silu(gate) * x``.

    Args:
        x: ``[M, K]``, columns contiguous.
        group_size: of the weight that will be applied: 32, 64 or 128.
        residual: ``[M, K]`` to add first, or None.
        norm_weight: ``[K]`` of an RMSNorm, or None.
        eps: of the norm.
        gate: ``[M, K]``, or None; not together with residual.
        in_rows: codes int8 ``[M, blocks * 64]`` as ``prefill_linear`` reads them (see its
            ``arrange_activation``), and nothing in sums.

    Returns:
        codes int8 ``[ceil(M / 8), blocks, 512]``, blocks of 64 columns in whole groups; sums int32
        ``[ceil(M / 8), parts, 8]`` of the codes of each block, or half a block for groups of 32;
        scale float32 ``[ceil(M / 8) * 8]``; and ``x + residual``, which is x itself where there is
        none. Entries of tokens beyond M are not written.
    """
    tokens, size = x.shape
    tiles = triton.cdiv(tokens, TILE_TOKENS)
    step_blocks = max(group_size // BLOCK, 1)
    blocks = triton.cdiv(size, step_blocks * BLOCK) * step_blocks
    sum_width = min(group_size, BLOCK)
    device = x.device
    shape = (tokens, blocks * BLOCK) if in_rows else (tiles, blocks, TILE_BYTES)
    codes = torch.empty(shape, dtype=torch.int8, device=device)
    parts = 0 if in_rows else blocks * (BLOCK // sum_width)
    sums = torch.empty(tiles, parts, TILE_TOKENS, dtype=torch.int32, device=device)
    scale = torch.empty(tiles * TILE_TOKENS, dtype=torch.float32, device=device)
    total = x if residual is None else torch.empty(tokens, size, dtype=x.dtype, device=device)
    other = residual if gate is None else gate
    columns = max(triton.next_power_of_2(blocks * BLOCK), 128)
    act_quant_kernel[(tokens,)](
        x,
        x if other is None else other,
        x if norm_weight is None else norm_weight,
        total,
        codes,
        sums,
        scale,
        size,
        blocks,
        eps,
        x.stride(0),
        0 if other is None else other.stride(0),
        COLUMNS=columns,
        SUM_WIDTH=sum_width,
        ADD=residual is not None,
        NORM=norm_weight is not None,
        GATE=gate is not None,
        IN_ROWS=in_rows,
        num_warps=min(max(columns // 512, 1), 16),
        enable_fp_fusion=False,
    )
    return codes, sums, scale, total
