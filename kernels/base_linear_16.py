"""Linear layer with 4-bit base codes and 16-bit activations (W4A16) for few tokens.

Codes become 16-bit floating-point numbers, exactly, in the registers of the lane that feeds them to
the tensor cores. Their products are summed in float32, times the scale a block of 64 columns or
half a block. The order of a sum is fixed by the weight's shape, and a token has a column of the
result to itself: a row's bits depend neither on the other rows nor on their number.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import check_planes, check_tensor
from nestq.kernels.tile_operands import left_operand, row_scales

MAX_TOKENS = 16


class BaseLinear16Config(NamedTuple):
    """How the work is divided. The warps fix the order of a sum: choose by the weight's shape."""

    warps: int
    """Warps of a program, which share the blocks of 64 columns."""
    tiles: int
    """Tiles of 16 rows that a program computes."""
    stages: int
    """Steps whose loads are in flight, that of the present one included."""


@triton.jit
def _codes_16(base, x, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Codes of the low or high nibbles of int8 bytes, in the dtype that x points to."""
    if ASM == "":
        nibble = base.to(tl.uint8, bitcast=True)
        if HIGH:
            nibble = nibble >> 4
        return (((nibble & 0x0F) ^ 0x08).to(tl.int32) - 8).to(tl.float32).to(x.dtype.element_ty)
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,r", [base], dtype=x.dtype.element_ty, is_pure=True, pack=4
    )


@triton.jit
def _right(x, WARPS: tl.constexpr):
    """``[WARPS, 32, 8]`` of 32 columns of 8 tokens, with the columns in the same order."""
    x = x.reshape(WARPS, 8, 4, 2, 4).permute(0, 3, 2, 4, 1)
    return x.reshape(WARPS, 32, 8)


@triton.jit
def _products(low, high, x_low, x_high, scales, GROUP_SIZE: tl.constexpr):
    """A block's share float32 ``[WARPS, 16, 8]`` of the sums of a tile of rows and of tokens."""
    first = tl.dot(low, x_low)
    if GROUP_SIZE == 32:
        return first * scales[0] + tl.dot(high, x_high) * scales[1]
    return tl.dot(high, x_high, acc=first) * scales[0]


@triton.jit
def base_linear_16_kernel(
    x,  # [M, SIZE]
    base,  # int8 [tiles, BLOCKS, 512]
    scale_codes,  # int32 [tiles, GROUPS, 8], two codes a word
    unit,  # float32 [N]
    bias,  # [N], or unused
    out,  # [M, N]
    tokens,
    rows,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    parts: tl.constexpr = 2 if GROUP_SIZE == 32 else 1
    first_tile = tl.program_id(0) * TILES
    warp = tl.arange(0, WARPS)
    byte = tl.arange(0, 512)[None, :]
    pair = tl.arange(0, 8)[None, :]
    row = tl.arange(0, 16)
    token = tl.arange(0, 8)
    column = tl.arange(0, 32)[None, None, :]
    sums = ()
    for _ in tl.static_range(TILES * TOKEN_TILES):
        sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    for step in tl.range(0, tl.cdiv(BLOCKS, WARPS), num_stages=STAGES):
        block = step * WARPS + warp
        inside = (block < BLOCKS)[:, None]
        activations = ()
        for t in tl.static_range(TOKEN_TILES):
            m = (t * 8 + token)[None, :, None]
            for half in tl.static_range(2):
                k = block[:, None, None] * 64 + half * 32 + column
                part = tl.load(x + m * SIZE + k, mask=(m < tokens) & (k < SIZE), other=0)
                activations = activations + (_right(part, WARPS),)
        updated = ()
        for i in tl.static_range(TILES):
            # Tiles outside are the last one again: their results are not stored.
            tile = tl.minimum(first_tile + i, tl.cdiv(rows, 16) - 1).to(tl.int64)
            b = tl.load(base + (tile * BLOCKS + block[:, None]) * 512 + byte, mask=inside, other=0)
            low = left_operand(_codes_16(b, x, False, LOW), WARPS)
            high = left_operand(_codes_16(b, x, True, HIGH), WARPS)
            scales = ()
            for part in tl.static_range(parts):
                group = ((block * 64 + part * 32) // GROUP_SIZE)[:, None]
                at = (tile * GROUPS + group) * 8 + pair
                words = tl.load(scale_codes + at, mask=group < GROUPS, other=0)
                scales = scales + (row_scales(words, WARPS)[:, :, None].to(tl.float32),)
            for t in tl.static_range(TOKEN_TILES):
                products = _products(
                    low, high, activations[2 * t], activations[2 * t + 1], scales, GROUP_SIZE
                )
                updated = updated + (sums[i * TOKEN_TILES + t] + products,)
        sums = updated

    for t in tl.static_range(TOKEN_TILES):
        m = t * 8 + token
        for i in tl.static_range(TILES):
            n = (first_tile + i) * 16 + row
            row_unit = tl.load(unit + n, mask=n < rows, other=0)
            value = tl.sum(sums[i * TOKEN_TILES + t], axis=0) * row_unit[:, None]
            if HAS_BIAS:
                value += tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)[:, None]
            inside = (n < rows)[:, None] & (m < tokens)[None, :]
            tl.store(out + m[None, :] * rows + n[:, None], value, mask=inside)


def base_linear_16_config(tiles: int, blocks: int) -> BaseLinear16Config:
    """By the weight's shape alone, as the warps fix the order of a sum."""
    return BaseLinear16Config(warps=8 if blocks >= 128 else 4, tiles=1, stages=4)


def base_linear_16(
    x: Tensor,
    base: Tensor,
    scale_codes: Tensor,
    unit: Tensor,
    bias: Tensor | None,
    group_size: int,
    config: BaseLinear16Config | None = None,
) -> Tensor:
    """``x @ W.T + bias`` of 16-bit activations and the draft's weight in tiles.

    Args:
        x: float16 or bfloat16 ``[M, K]``, M at most 16. Multiples of 8 are fastest for K.
        base: uint8 ``[ceil(N / 16), blocks, 512]``.
        scale_codes: int16 ``[ceil(N / 16), G, 16]``.
        unit: float32 ``[N]``.
        bias: ``[N]`` or None.
        group_size: codes that share a scale: 32, 64 or 128.
        config: how the work is divided, or None for :func:`base_linear_16_config`.

    Returns:
        ``[M, N]`` in the dtype of x.

    Raises:
        ValueError: an argument has another dtype, device, shape or range, or has gaps.
    """
    if x.dim() != 2 or not x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must have shape [M <= {MAX_TOKENS}, K], got {tuple(x.shape)}")
    check_tensor("x", x, (torch.float16, torch.bfloat16), tuple(x.shape), x.device)
    check_planes(base, None, scale_codes, unit, bias, group_size, x.device)
    tokens, columns = x.shape
    groups, rows = scale_codes.shape[1], unit.shape[0]
    if -(-columns // group_size) != groups:
        raise ValueError(f"x must fill {groups} groups of {group_size}, got {columns} columns")
    tiles, blocks, _ = base.shape
    config = config or base_linear_16_config(tiles, blocks)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    interpreted = triton.knobs.runtime.interpret
    base_linear_16_kernel[(triton.cdiv(tiles, config.tiles),)](
        x,
        base.view(torch.int8),
        scale_codes.view(torch.int32),
        unit,
        unit if bias is None else bias,
        out,
        tokens,
        rows,
        SIZE=columns,
        BLOCKS=blocks,
        GROUPS=groups,
        GROUP_SIZE=group_size,
        HAS_BIAS=bias is not None,
        TOKEN_TILES=triton.cdiv(tokens, 8),
        TILES=config.tiles,
        WARPS=config.warps,
        STAGES=config.stages,
        LOW="" if interpreted else _assembly(x.dtype, high=False),
        HIGH="" if interpreted else _assembly(x.dtype, high=True),
        num_warps=config.warps,
        enable_fp_fusion=False,
    )
    return out


def _assembly(dtype: torch.dtype, high: bool) -> str:
    """Assembly for the codes of four nibbles as pairs of ``dtype``.

    Under the upper byte of 1024 in float16, or of 128 in bfloat16, a small integer in the lower
    byte adds itself. The codes come out 8 too large, and that is taken off with it.
    """
    shift = "shr.b32 u, $2, 4;" if high else "mov.b32 u, $2;"
    kind, upper, one, offset = {
        torch.float16: ("f16x2", 0x64646464, 0x3C003C00, 0xE408E408),
        torch.bfloat16: ("bf16x2", 0x43434343, 0x3F803F80, 0xC308C308),
    }[dtype]
    return (
        f"{{ .reg .b32 u, one, offset; {shift} lop3.b32 u, u, 0x0F0F0F0F, 0x08080808, 0x6A; "
        f"mov.b32 one, {one}; mov.b32 offset, {offset}; "
        f"prmt.b32 $0, u, {upper}, 0x4140; prmt.b32 $1, u, {upper}, 0x4342; "
        f"fma.rn.{kind} $0, $0, one, offset; fma.rn.{kind} $1, $1, one, offset; }}"
    )
