"""Linear layer on nested planes for many tokens: an exact INT8 matrix product.

The same integers, the same last step and so the same bits as ``dual_plane_linear``. Here a program
computes a square of the result: planes are unpacked in registers, straight into the left operand of
the tensor cores, and activations come through shared memory as the right one. A dot product over a
group is an int32; times the group's scale it is added to a 64-bit sum, which takes two registers an
output and so bounds the square. There is no unpacked weight in memory.

Activations lie in rows here, but the words of four codes are in another order
(:func:`arrange_activation`): the order in which a plane's tile has its columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import FLOATS, check_planes, check_tensor
from nestq.kernels.exact_sums import add_scaled, scale_sums, wide_mad
from nestq.kernels.planes import HIGH_BASE, LOW_BASE, base_codes
from nestq.kernels.tile_operands import left_operand, row_scales


class PrefillConfig(NamedTuple):
    """How the work is divided: any choice gives the same bits."""

    rows: int
    """Weight rows of a program."""
    tokens: int
    """Tokens of a program."""
    warps: int
    """Warps of a program."""
    blocks: int
    """Blocks of 64 columns of a step; even for groups of 128."""
    stages: int
    """Steps whose loads are in flight, that of the present one included."""


@triton.jit
def _target_codes(base, refinement, OVERLAP: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """``overlap * q + q_r`` as int8, of the low or high nibbles of bytes."""
    if ASM == "":
        b = base.to(tl.uint8, bitcast=True)
        r = refinement.to(tl.uint8, bitcast=True)
        if HIGH:
            b = b >> 4
            r = r >> 4
        code = ((b & 0x0F) ^ 0x08).to(tl.int32) * OVERLAP + (r & 0x0F) - (8 * OVERLAP + 8)
        return code.to(tl.int8)
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [base, refinement], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def _weight_codes(
    base, refinement, HIGH: tl.constexpr, OVERLAP: tl.constexpr, TILES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Left operand ``[TILES * 16, 32]`` of tiles ``[TILES, 512]``."""
    if OVERLAP:
        codes = _target_codes(base, refinement, OVERLAP, HIGH, ASM)
    else:
        codes = base_codes(base, HIGH, ASM)
    return left_operand(codes, TILES).reshape(TILES * 16, 32)


@triton.jit
def _load_scale(scale_codes, group, GROUPS: tl.constexpr):
    """Words int32 ``[TILES, 8]`` of the scale codes of rows g and g + 8."""
    inside = tl.zeros(scale_codes.shape, tl.int32) + group < GROUPS
    return tl.load(scale_codes + group * 8, mask=inside, other=0)


@triton.jit
def prefill_linear_kernel(
    x_codes,  # int8 [M, BLOCKS * 64]
    x_scale,  # float32 [M]
    base,  # int8 [tiles, BLOCKS, 512]
    refinement,  # the same, or unused
    scale_codes,  # int32 [tiles, GROUPS, 8], two codes a word
    unit,  # float32 [N]
    bias,  # [N], or unused
    out,  # [M, N]
    tokens,
    rows,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,  # 0 reads the base only
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP_BLOCKS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MAD: tl.constexpr,
):
    TILES: tl.constexpr = ROWS // 16

    # Programs that run at the same time share weights and activations in the L2 cache.
    token_parts = tl.cdiv(tokens, TOKENS)
    row_parts = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    first_part = program // (NEIGHBOURS * row_parts) * NEIGHBOURS
    width = tl.minimum(token_parts - first_part, NEIGHBOURS)
    inside = program - first_part * row_parts
    token_first = (first_part + inside % width) * TOKENS
    tile_first = inside // width * TILES

    # Tiles and tokens outside are those at the edge once more: their results are not stored.
    tile = tl.minimum(tile_first + tl.arange(0, TILES), tl.cdiv(rows, 16) - 1).to(tl.int64)
    plane_at = (tile * (BLOCKS * 512))[:, None] + tl.arange(0, 512)[None, :]
    base += plane_at
    refinement += plane_at
    token = token_first + tl.arange(0, TOKENS)
    x_token = tl.minimum(token, tokens - 1).to(tl.int64)
    columns: tl.constexpr = 32 if GROUP_SIZE == 32 else 64
    x_codes += (x_token * (BLOCKS * 64))[:, None] + tl.arange(0, columns)[None, :]
    row = tl.arange(0, ROWS)
    n = tile_first * 16 + row
    scale_codes += (tile * (GROUPS * 8))[:, None] + tl.arange(0, 8)[None, :]

    acc = tl.zeros((ROWS, TOKENS), tl.int64)
    dot = tl.zeros((ROWS, TOKENS), tl.int32)
    step_groups: tl.constexpr = STEP_BLOCKS * 64 // GROUP_SIZE
    scales = ()
    for i in tl.static_range(step_groups):
        scales = scales + (_load_scale(scale_codes, i, GROUPS),)
    for step in range(BLOCKS // STEP_BLOCKS):
        # A scale is loaded for the next step where this step's has been used.
        next_group = (step + 1) * step_groups
        following = ()
        for i in tl.static_range(STEP_BLOCKS):
            block = step * STEP_BLOCKS + i
            b = tl.load(base + block * 512)
            r = tl.load(refinement + block * 512) if OVERLAP else b
            low = _weight_codes(b, r, False, OVERLAP, TILES, LOW)
            high = _weight_codes(b, r, True, OVERLAP, TILES, HIGH)
            x = tl.load(x_codes + block * 64)
            if GROUP_SIZE == 32:
                dot = tl.dot(low, x.T, out_dtype=tl.int32)
                acc = add_scaled(
                    acc, dot, row_scales(scales[2 * i], TILES).reshape(ROWS)[:, None], MAD
                )
                following = following + (_load_scale(scale_codes, next_group + 2 * i, GROUPS),)
                x = tl.load(x_codes + block * 64 + 32)
                dot = tl.dot(high, x.T, out_dtype=tl.int32)
            else:
                codes = tl.join(low, high).permute(0, 2, 1).reshape(ROWS, 64)
                if GROUP_SIZE == 64 or i % 2 == 0:
                    dot = tl.dot(codes, x.T, out_dtype=tl.int32)
                else:
                    dot = tl.dot(codes, x.T, acc=dot, out_dtype=tl.int32)
            if GROUP_SIZE <= 64 or i % 2 == 1:
                scale = row_scales(scales[(i + 1) * 64 // GROUP_SIZE - 1], TILES).reshape(ROWS)
                acc = add_scaled(acc, dot, scale[:, None], MAD)
                group = next_group + (i + 1) * 64 // GROUP_SIZE - 1
                following = following + (_load_scale(scale_codes, group, GROUPS),)
        scales = following

    x_step = tl.load(x_scale + token, mask=token < tokens, other=0)
    row_factor = tl.load(unit + n, mask=n < rows, other=0)
    value = scale_sums(acc, x_step[None, :], row_factor[:, None], OVERLAP)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)[:, None]
    value = value.to(out.dtype.element_ty)
    at = token.to(tl.int64)[:, None] * rows + n[None, :]
    tl.store(out + at, value.T, mask=(token < tokens)[:, None] & (n < rows)[None, :])


def _target_assembly(overlap: int, high: bool) -> str:
    """Assembly for ``overlap * q + q_r`` of four low or high nibbles.

    The sum of all terms is each code plus 128, in a byte of its own: there is no carry.
    """
    shift = "shr.b32 b, $1, 4; shr.b32 r, $2, 4;" if high else "mov.b32 b, $1; mov.b32 r, $2;"
    offset = (120 - 8 * overlap) * 0x01010101 % (1 << 32)
    return (
        f"{{ .reg .b32 b, r; {shift} lop3.b32 b, b, 0x0F0F0F0F, 0x08080808, 0x6A; "
        f"and.b32 r, r, 0x0F0F0F0F; mad.lo.u32 b, b, {overlap}, r; add.u32 b, b, {offset}; "
        "xor.b32 $0, b, 0x80808080; }"
    )


def _assembly(overlap: int) -> tuple[str, str]:
    """How four low and four high nibbles are unpacked; nothing where there is no assembly."""
    if triton.knobs.runtime.interpret:
        return "", ""
    if overlap == 0:
        return LOW_BASE, HIGH_BASE
    return _target_assembly(overlap, high=False), _target_assembly(overlap, high=True)


def arrange_activation(codes: Tensor, group_size: int) -> Tensor:
    """Activation codes int8 ``[M, K]`` as :func:`prefill_linear` reads them.

    K is padded with zeros to whole groups and blocks of 64. Then word ``2 * t + slot`` of the eight
    words of four codes in 32 columns goes to place ``4 * slot + t``: column c of 32 goes to byte
    ``c % 8 // 4 * 16 + c // 8 * 4 + c % 4``.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % max(group_size, 64)))
    words = padded.view(codes.shape[0], padded.shape[1] // 32, 4, 2, 4)
    return words.transpose(2, 3).reshape(padded.shape)


def prefill_config(group_size: int) -> PrefillConfig:
    """A square of the result that two groups of four warps keep in registers."""
    blocks = 2 if group_size == 128 else 1
    # Activations and planes of a step take 16 KiB a block; some GPUs have 99 KiB a program.
    return PrefillConfig(
        rows=128, tokens=128, warps=8, blocks=blocks, stages=3 if blocks == 2 else 4
    )


def prefill_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale_codes: Tensor,
    unit: Tensor,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
    out: Tensor,
    config: PrefillConfig | None = None,
) -> None:
    """``x @ W.T + bias`` of quantized activations in rows and planes in tiles.

    Args:
        x_codes: int8 ``[M, blocks * 64]``, arranged as by :func:`arrange_activation`.
        x_scale: float32 ``[M]``.
        base: uint8 ``[ceil(N / 16), blocks, 512]``.
        refinement: the same, or None for the draft's weight.
        scale_codes: int16 ``[ceil(N / 16), G, 16]``.
        unit: float32 ``[N]``.
        bias: ``[N]`` or None.
        group_size: codes that share a scale: 32, 64 or 128.
        overlap: base steps are divided in this many target steps, 1 to 16.
        out: ``[M, N]``, contiguous; written.
        config: how the work is divided, or None for :func:`prefill_config`.

    Raises:
        ValueError: an argument has another dtype, device, shape or range, or has gaps.
    """
    check_planes(base, refinement, scale_codes, unit, bias, group_size, x_codes.device)
    if x_codes.dim() != 2:
        raise ValueError(f"x_codes must have shape [M, K], got {tuple(x_codes.shape)}")
    tokens, blocks, rows = x_codes.shape[0], base.shape[1], unit.shape[0]
    check_tensor("x_codes", x_codes, (torch.int8,), (tokens, blocks * 64), x_codes.device)
    check_tensor("x_scale", x_scale, (torch.float32,), (tokens,), x_codes.device)
    if not 1 <= overlap <= 16:
        raise ValueError(f"overlap must be from 1 to 16, got {overlap!r}")
    check_tensor("out", out, FLOATS, (tokens, rows), x_codes.device)
    if config is None:
        config = prefill_config(group_size)
    if blocks % config.blocks or config.blocks * 64 % group_size:
        raise ValueError(f"config.blocks must divide {blocks} into groups, got {config.blocks}")
    if tokens == 0:
        return
    used_overlap = 0 if refinement is None else overlap
    low, high = _assembly(used_overlap)
    programs = triton.cdiv(tokens, config.tokens) * triton.cdiv(rows, config.rows)
    prefill_linear_kernel[(programs,)](
        x_codes,
        x_scale,
        base.view(torch.int8),
        base.view(torch.int8) if refinement is None else refinement.view(torch.int8),
        scale_codes.view(torch.int32),
        unit,
        unit if bias is None else bias,
        out,
        tokens,
        rows,
        BLOCKS=blocks,
        GROUPS=scale_codes.shape[1],
        GROUP_SIZE=group_size,
        OVERLAP=used_overlap,
        HAS_BIAS=bias is not None,
        ROWS=config.rows,
        TOKENS=config.tokens,
        STEP_BLOCKS=config.blocks,
        NEIGHBOURS=16,
        LOW=low,
        HIGH=high,
        MAD=wide_mad(),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=False,
    )
