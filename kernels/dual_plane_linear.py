"""Linear layer on nested planes for few tokens: exact INT8 arithmetic at the speed of the memory.

Planes, scales and activations lie in tiles (``nestq.tile_layout``), so that each warp loads its
operands of the matrix instruction directly into registers: no shared memory and no barrier between
a tile's first and last block. A program computes tiles of 16 weight rows one after the other; its
warps share the blocks of 64 columns, and each issues all loads of a step before it uses the first.
Sums are exact 64-bit integers, so that neither this division of labour nor the number of tokens
changes a bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.planes import HIGH_BASE, LOW_BASE, base_codes, compose_asm, composed_codes


@triton.jit
def _load_planes(
    base,
    refinement,
    scale_codes,
    step,
    chunks,
    blocks,
    groups,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """What a step reads: tuples of base and refinement tiles and of scale codes ``[WARPS, 16]``."""
    warp = tl.arange(0, WARPS)[:, None]
    tile = step // chunks
    first = (step % chunks * WARPS + warp) * UNROLL
    byte = tl.arange(0, 512)[None, :]
    row = tl.arange(0, 16)[None, :]
    bases = ()
    refinements = ()
    for i in tl.static_range(UNROLL):
        at = (tile * blocks + first + i) * 512 + byte
        inside = first + i < blocks
        bases = bases + (tl.load(base + at, mask=inside, other=0),)
        if OVERLAP:
            refinements = refinements + (tl.load(refinement + at, mask=inside, other=0),)
    scales = ()
    for i in tl.static_range(UNROLL * 64 // GROUP_SIZE):
        group = first * 64 // GROUP_SIZE + i
        at = (tile * groups + group) * 16 + row
        inside = group < groups
        scales = scales + (tl.load(scale_codes + at, mask=inside, other=0),)
    return bases, refinements, scales


@triton.jit
def _load_activations(
    x_codes,
    x_sums,
    token_tiles,
    chunk,
    blocks,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Tuples of the activations of a chunk and, with an overlap, of what their sums repay."""
    parts: tl.constexpr = 2 if GROUP_SIZE == 32 else 1
    warp = tl.arange(0, WARPS)[:, None, None]
    tile = tl.arange(0, TOKEN_TILES)[None, :, None]
    byte = tl.arange(0, 512)[None, None, :]
    token = tl.arange(0, TOKEN_TILES * 8)[None, None, :]
    first = (chunk * WARPS + warp) * UNROLL
    activations = ()
    repaid = ()
    for i in tl.static_range(UNROLL):
        inside = (first + i < blocks) & (tile < token_tiles)
        at = (tile * blocks + first + i) * 512 + byte
        activations = activations + (tl.load(x_codes + at, mask=inside, other=0),)
        if OVERLAP:
            for part in tl.static_range(parts):
                place = (token // 8 * blocks + first + i) * parts + part
                inside = (first + i < blocks) & (token // 8 < token_tiles)
                sums = tl.load(x_sums + place * 8 + token % 8, mask=inside, other=0)
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
    blocks,
    groups,
    chunks,
    tiles,
    tiles_a_program,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,  # 0 reads the base only
    HAS_BIAS: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    TOKENS: tl.constexpr = TOKEN_TILES * 8
    # The base alone is read as 16 * q.
    divisor: tl.constexpr = OVERLAP if OVERLAP else 16
    token = tl.arange(0, TOKENS)
    x_step = tl.load(x_scale + token, mask=token < tokens, other=0)
    factor = tl.div_rn(x_step, tl.full((1,), divisor, tl.float32))
    tile = tl.program_id(0) * tiles_a_program
    start = tile * chunks
    last = tl.minimum(tile + tiles_a_program, tiles) * chunks

    acc = tl.zeros((WARPS, 16, TOKENS), tl.int64)
    for step in range(start, last):
        bases, refinements, scales = _load_planes(
            base, refinement, scale_codes, step, chunks, blocks, groups,
            GROUP_SIZE, OVERLAP, WARPS, UNROLL,
        )  # fmt: skip
        chunk = step % chunks
        activations, repaid = _load_activations(
            x_codes, x_sums, token_tiles, chunk, blocks,
            GROUP_SIZE, OVERLAP, TOKEN_TILES, WARPS, UNROLL,
        )  # fmt: skip
        n = step // chunks * 16 + tl.arange(0, 16)
        row_factor = tl.load(unit + n, mask=n < rows, other=0)
        if HAS_BIAS:
            row_bias = tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)
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
        if chunk == chunks - 1:
            value = tl.sum(acc, axis=0).to(tl.float32) * (factor[None, :] * row_factor[:, None])
            if HAS_BIAS:
                value += row_bias[:, None]
            inside = (n < rows)[:, None] & (token < tokens)[None, :]
            tl.store(out + token[None, :] * rows + n[:, None], value, mask=inside)
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
    rows: int,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
    dtype: torch.dtype,
    config: tuple[int, int, int],
) -> Tensor:
    """``x @ W.T + bias`` of quantized activations in tiles and planes in tiles.

    Args:
        x_codes: int8 ``[T, blocks, 512]``, T tiles of 8 tokens.
        x_sums: int32 ``[T, blocks, 8]`` sums of the codes of a block; of each half of a block,
            ``[T, 2 * blocks, 8]``, for groups of 32.
        x_scale: float32 ``[T * 8]``.
        tokens: M.
        base: uint8 ``[ceil(N / 16), blocks, 512]``.
        refinement: the same, or None for the draft's weight.
        scale_codes: int16 ``[ceil(N / 16), G, 16]``.
        unit: float32 ``[N]``.
        rows: N.
        bias: ``[N]`` or None.
        group_size: codes that share a scale.
        overlap: base steps are divided in this many target steps.
        dtype: of the result.
        config: warps of a program, blocks that a warp loads at once, tiles of a program.

    Returns:
        ``[M, N]`` of ``dtype``.
    """
    warps, unroll, tiles_a_program = config
    token_tiles, blocks, _ = x_codes.shape
    tiles = base.shape[0]
    used_overlap = 0 if refinement is None else overlap
    low, high = _assembly(used_overlap)
    out = torch.empty(tokens, rows, dtype=dtype, device=x_codes.device)
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
        blocks,
        scale_codes.shape[1],
        triton.cdiv(blocks, warps * unroll),
        tiles,
        tiles_a_program,
        GROUP_SIZE=group_size,
        OVERLAP=used_overlap,
        HAS_BIAS=bias is not None,
        TOKEN_TILES=triton.next_power_of_2(token_tiles),
        WARPS=warps,
        UNROLL=unroll,
        LOW=low,
        HIGH=high,
        num_warps=warps,
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
