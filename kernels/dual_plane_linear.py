"""Linear layer on nested planes for few tokens: exact INT8 arithmetic at the speed of the memory.

Planes, scales and activations lie in tiles (``nestq.tile_layout``), so that each warp loads its
operands of the matrix instruction directly into registers. A program computes some tiles of 16
weight rows one after the other, in steps: its warps share the blocks of 64 columns, and each loads
the planes of the next step before it uses those of this one. All steps are unrolled, so that an
address is one register and a constant. Sums are exact 64-bit integers: neither this division of
labour nor the number of tokens changes a bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.planes import HIGH_BASE, LOW_BASE, base_codes, compose_asm, composed_codes


class LinearConfig(NamedTuple):
    """How the work is divided: any choice gives the same bits."""

    warps: int
    """Warps of a program, which share the blocks of a tile."""
    unroll: int
    """Blocks of 64 columns that a warp loads in a step; even for groups of 128."""
    tiles: int
    """Tiles of 16 rows that a program computes."""


@triton.jit
def _load(pointer, inside, ALL_INSIDE: tl.constexpr):
    """Zeros outside; without a mask where the compiler knows that there is no outside."""
    if ALL_INSIDE:
        return tl.load(pointer)
    return tl.load(pointer, mask=inside, other=0)


@triton.jit
def _load_planes(
    base,
    refinement,
    scale_codes,
    STEP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """What a step reads: tuples of base and refinement tiles and of scale codes ``[WARPS, 16]``."""
    tile: tl.constexpr = STEP // CHUNKS
    first: tl.constexpr = STEP % CHUNKS * WARPS * UNROLL
    all_inside: tl.constexpr = first + WARPS * UNROLL <= BLOCKS
    # Half of the last block may have no group.
    all_groups_inside: tl.constexpr = all_inside and BLOCKS * 64 == GROUPS * GROUP_SIZE
    warp = tl.arange(0, WARPS)[:, None]
    bases = ()
    refinements = ()
    for i in tl.static_range(UNROLL):
        at = (tile * BLOCKS + first + i) * 512
        inside = first + i + warp * UNROLL < BLOCKS
        bases = bases + (_load(base + at, inside, all_inside),)
        if OVERLAP:
            refinements = refinements + (_load(refinement + at, inside, all_inside),)
    scales = ()
    for i in tl.static_range(UNROLL * 64 // GROUP_SIZE):
        group = first * 64 // GROUP_SIZE + i
        at = (tile * GROUPS + group) * 16
        inside = group + warp * (UNROLL * 64 // GROUP_SIZE) < GROUPS
        scales = scales + (_load(scale_codes + at, inside, all_groups_inside),)
    return bases, refinements, scales


@triton.jit
def _load_activations(
    x_codes,
    x_sums,
    token_tiles,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Tuples of the activations of a chunk and, with an overlap, of what their sums repay."""
    parts: tl.constexpr = 2 if GROUP_SIZE == 32 else 1
    first: tl.constexpr = CHUNK * WARPS * UNROLL
    warp = tl.arange(0, WARPS)[:, None, None]
    tile = tl.arange(0, TOKEN_TILES)[None, :, None]
    token = tl.arange(0, TOKEN_TILES * 8)[None, None, :]
    activations = ()
    repaid = ()
    for i in tl.static_range(UNROLL):
        inside = (first + i + warp * UNROLL < BLOCKS) & (tile < token_tiles)
        activations = activations + (tl.load(x_codes + (first + i) * 512, mask=inside, other=0),)
        if OVERLAP:
            for part in tl.static_range(parts):
                at = ((first + i) * parts + part) * 8
                inside = (first + i + warp * UNROLL < BLOCKS) & (token // 8 < token_tiles)
                sums = tl.load(x_sums + at, mask=inside, other=0)
                repaid = repaid + (sums * (120 - 8 * OVERLAP),)
    return activations, repaid


@triton.jit
def _weight_codes(
    base,
    refinement,
    HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Left operand ``[WARPS, 16, 32]``: rows by half and g; columns by slot, t and byte."""
    b = base.reshape(WARPS, 8, 4, 2, 2, 4).permute(0, 3, 1, 4, 2, 5).reshape(WARPS, 16, 32)
    if OVERLAP:
        r = refinement.reshape(WARPS, 8, 4, 2, 2, 4)
        r = r.permute(0, 3, 1, 4, 2, 5).reshape(WARPS, 16, 32)
        return composed_codes(b, r, OVERLAP, HIGH, ASM)
    return base_codes(b, HIGH, ASM)


@triton.jit
def _activation_codes(x, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Right operands ``[WARPS, 32, TOKENS]`` of the low and of the high nibbles."""
    x = x.reshape(WARPS, TOKENS, 4, 2, 2, 4).permute(0, 1, 4, 2, 5, 3)
    low, high = tl.split(x)
    low = low.reshape(WARPS, TOKENS, 32).permute(0, 2, 1)
    return low, high.reshape(WARPS, TOKENS, 32).permute(0, 2, 1)


@triton.jit
def _multiply(
    acc,
    planes,
    activations,
    repaid,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Add a step's products to the sums int64 ``[WARPS, 16, TOKENS]``."""
    bases, refinements, scales = planes
    dot = tl.zeros((WARPS, 16, TOKENS), tl.int32)
    for i in tl.static_range(UNROLL):
        x_low, x_high = _activation_codes(activations[i], TOKENS, WARPS)
        refined = refinements[i] if OVERLAP else bases[i]
        low = _weight_codes(bases[i], refined, False, OVERLAP, WARPS, LOW)
        high = _weight_codes(bases[i], refined, True, OVERLAP, WARPS, HIGH)
        if GROUP_SIZE == 32:
            if OVERLAP:
                dot += repaid[2 * i]
            dot = tl.dot(low, x_low, acc=dot, out_dtype=tl.int32)
            acc += dot.to(tl.int64) * scales[2 * i].to(tl.int64)[:, :, None]
            dot = tl.zeros((WARPS, 16, TOKENS), tl.int32)
            if OVERLAP:
                dot += repaid[2 * i + 1]
        else:
            if OVERLAP:
                dot += repaid[i]
            dot = tl.dot(low, x_low, acc=dot, out_dtype=tl.int32)
        dot = tl.dot(high, x_high, acc=dot, out_dtype=tl.int32)
        if GROUP_SIZE <= 64 or i % 2 == 1:
            scale = scales[(i + 1) * 64 // GROUP_SIZE - 1]
            acc += dot.to(tl.int64) * scale.to(tl.int64)[:, :, None]
            dot = tl.zeros((WARPS, 16, TOKENS), tl.int32)
    return acc


@triton.jit
def dual_plane_linear_kernel(
    x_codes,  # int8 [T, blocks, 512]
    x_sums,  # int32 [T, blocks * 64 / min(group size, 64), 8]
    x_scale,  # float32 [T * 8]
    base,  # int8 [tiles, blocks, 512]
    refinement,  # the same, or unused
    scale_codes,  # int16 [tiles, groups, 16]
    unit,  # float32 [N]
    bias,  # [N], or unused
    out,  # [M, N]
    tokens,
    token_tiles,
    rows,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,  # 0 reads the base only
    HAS_BIAS: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    TOKENS: tl.constexpr = TOKEN_TILES * 8
    chunks: tl.constexpr = (BLOCKS + WARPS * UNROLL - 1) // (WARPS * UNROLL)
    parts: tl.constexpr = 2 if GROUP_SIZE == 32 else 1
    # The base alone is read as 16 * q.
    divisor: tl.constexpr = OVERLAP if OVERLAP else 16
    # The last program computes some tiles again rather than fewer.
    tile = tl.minimum(tl.program_id(0) * TILES, tl.cdiv(rows, 16) - TILES).to(tl.int64)

    warp = tl.arange(0, WARPS)
    plane_at = tile * BLOCKS * 512 + (warp * UNROLL * 512)[:, None] + tl.arange(0, 512)[None, :]
    warp_groups: tl.constexpr = UNROLL * 64 // GROUP_SIZE
    row = tl.arange(0, 16)
    scale_at = tile * GROUPS * 16 + (warp * warp_groups * 16)[:, None] + row[None, :]
    token_tile = tl.arange(0, TOKEN_TILES)
    x_at = (token_tile * BLOCKS * 512)[None, :, None] + tl.arange(0, 512)[None, None, :]
    x_codes += x_at + (warp * UNROLL * 512)[:, None, None]
    token = tl.arange(0, TOKENS)
    sums_at = token // 8 * BLOCKS * parts * 8 + token % 8
    x_sums += sums_at[None, None, :] + (warp * UNROLL * parts * 8)[:, None, None]
    base += plane_at
    refinement += plane_at
    scale_codes += scale_at

    following = _load_planes(
        base, refinement, scale_codes, 0, chunks,
        BLOCKS, GROUPS, GROUP_SIZE, OVERLAP, WARPS, UNROLL,
    )  # fmt: skip
    activations, repaid = _load_activations(
        x_codes, x_sums, token_tiles, 0,
        BLOCKS, GROUP_SIZE, OVERLAP, TOKEN_TILES, WARPS, UNROLL,
    )  # fmt: skip
    x_step = tl.load(x_scale + token, mask=token < tokens, other=0)
    factor = tl.div_rn(x_step, tl.full((1,), divisor, tl.float32))
    acc = tl.zeros((WARPS, 16, TOKENS), tl.int64)
    for step in tl.static_range(TILES * chunks):
        planes = following
        if step + 1 < TILES * chunks:
            following = _load_planes(
                base, refinement, scale_codes, step + 1, chunks,
                BLOCKS, GROUPS, GROUP_SIZE, OVERLAP, WARPS, UNROLL,
            )  # fmt: skip
        if chunks > 1:
            activations, repaid = _load_activations(
                x_codes, x_sums, token_tiles, step % chunks,
                BLOCKS, GROUP_SIZE, OVERLAP, TOKEN_TILES, WARPS, UNROLL,
            )  # fmt: skip
        acc = _multiply(
            acc, planes, activations, repaid,
            GROUP_SIZE, OVERLAP, TOKENS, WARPS, UNROLL, LOW, HIGH,
        )  # fmt: skip
        if step % chunks == chunks - 1:
            n = (tile + step // chunks) * 16 + row
            row_factor = tl.load(unit + n, mask=n < rows, other=0)
            value = tl.sum(acc, axis=0).to(tl.float32) * (factor[None, :] * row_factor[:, None])
            if HAS_BIAS:
                value += tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)[:, None]
            inside = (n < rows)[:, None] & (token < tokens)[None, :]
            tl.store(out + token[None, :].to(tl.int64) * rows + n[:, None], value, mask=inside)
            acc = tl.zeros((WARPS, 16, TOKENS), tl.int64)


def dual_plane_linear(
    x_codes: Tensor,
    x_sums: Tensor,
    x_scale: Tensor,
    tokens: int,
    base: Tensor,
    refinement: Tensor | None,
    scale_codes: Tensor,
    unit: Tensor,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
    dtype: torch.dtype,
    config: LinearConfig,
) -> Tensor:
    """``x @ W.T + bias`` of quantized activations in tiles and planes in tiles.

    Args:
        x_codes: int8 ``[T, blocks, 512]``, T tiles of 8 tokens.
        x_sums: int32 ``[T, blocks, 8]`` sums of the codes of a block; of each half of a block,
            ``[T, 2 * blocks, 8]``, for groups of 32.
        x_scale: float32 ``[T * 8]``.
        tokens: M, at most 64.
        base: uint8 ``[ceil(N / 16), blocks, 512]``.
        refinement: the same, or None for the draft's weight.
        scale_codes: int16 ``[ceil(N / 16), G, 16]``.
        unit: float32 ``[N]``.
        bias: ``[N]`` or None.
        group_size: codes that share a scale.
        overlap: base steps are divided in this many target steps.
        dtype: of the result.
        config: how the work is divided.

    Returns:
        ``[M, N]`` of ``dtype``.
    """
    token_tiles = x_codes.shape[0]
    tiles, blocks, _ = base.shape
    rows = unit.shape[0]
    used_overlap = 0 if refinement is None else overlap
    low, high = _assembly(used_overlap)
    out = torch.empty(tokens, rows, dtype=dtype, device=x_codes.device)
    tiles_a_program = min(config.tiles, tiles)
    dual_plane_linear_kernel[(triton.cdiv(tiles, tiles_a_program),)](
        x_codes,
        x_sums,
        x_scale,
        base.view(torch.int8),
        base.view(torch.int8) if refinement is None else refinement.view(torch.int8),
        scale_codes,
        unit,
        unit if bias is None else bias,
        out,
        tokens,
        token_tiles,
        rows,
        BLOCKS=blocks,
        GROUPS=scale_codes.shape[1],
        GROUP_SIZE=group_size,
        OVERLAP=used_overlap,
        HAS_BIAS=bias is not None,
        TOKEN_TILES=triton.next_power_of_2(token_tiles),
        TILES=tiles_a_program,
        WARPS=config.warps,
        UNROLL=config.unroll,
        LOW=low,
        HIGH=high,
        num_warps=config.warps,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out


def _assembly(overlap: int) -> tuple[str, str]:
    """How four low and four high nibbles are unpacked; nothing where there is no assembly."""
    if triton.knobs.runtime.interpret:
        return "", ""
    if overlap == 0:
        return LOW_BASE, HIGH_BASE
    return compose_asm(overlap, high=False), compose_asm(overlap, high=True)
