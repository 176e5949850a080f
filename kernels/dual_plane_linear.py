"""Linear layer on nested planes for few tokens: exact INT8 arithmetic at the speed of the memory.

Planes, scales and activations lie in tiles (``nestq.tile_layout``), so that each warp loads its
operands of the matrix instruction directly into registers: no shared memory and no barrier in the
loop. A program computes 16 or 32 weight rows; its warps take turns along K. Sums are exact 64-bit
integers, so neither the number of warps and tokens nor any other choice here changes a bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.planes import HIGH_BASE, LOW_BASE, base_codes, compose_asm, composed_codes
from nestq.tile_layout import BLOCK


@triton.jit
def _load_scale(scale_codes, start, group, groups, row_limit, EVEN: tl.constexpr):
    """Scale codes of a group for each warp, int64 ``[WARPS, ROWS, 1]``."""
    at = scale_codes + start[None, :] + group[:, None] * 16
    if EVEN:
        codes = tl.load(at)
    else:
        inside = (group < groups)[:, None] & (start < row_limit * groups * 16)[None, :]
        codes = tl.load(at, mask=inside, other=0)
    return codes.to(tl.int64)[:, :, None]


@triton.jit
def _load_repaid(x_sums, start, at, inside, OVERLAP: tl.constexpr, EVEN: tl.constexpr):
    """What the offset of composed codes adds to a dot product, taken back: ``[WARPS, 1, TOKENS]``."""
    where = x_sums + start[None, :] + at[:, None]
    sums = tl.load(where) if EVEN else tl.load(where, mask=inside[:, None], other=0)
    return (sums * (120 - 8 * OVERLAP))[:, None, :]


@triton.jit
def dual_plane_linear_kernel(
    x_codes,  # int8 [T, blocks, 512]
    x_sums,  # int32 [T, blocks * SUMS, 8]
    x_scale,  # float32 [T * 8]
    base,  # int8 [N / 16, blocks, 512]
    refinement,  # the same, or unused
    scale_codes,  # int16 [N / 16, groups, 16]
    unit,  # float32 [N]
    bias,  # [N], or unused
    out,  # [M, N]
    tokens,
    rows,
    blocks,
    groups,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,  # 0 reads the base only
    HAS_BIAS: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    step_blocks: tl.constexpr = 2 if GROUP_SIZE == 128 else 1
    sums_in_block: tl.constexpr = 2 if GROUP_SIZE == 32 else 1
    tile_row = tl.program_id(0) * ROW_TILES + tl.arange(0, ROW_TILES)
    warp = tl.arange(0, WARPS)
    byte = tl.arange(0, 512)
    row = tl.arange(0, ROW_TILES * 16)
    token = tl.arange(0, TOKEN_TILES * 8)
    token_tile = tl.arange(0, TOKEN_TILES)
    base_start = (tile_row * blocks)[None, :, None] * 512 + byte[None, None, :]
    x_start = (token_tile * blocks)[None, :, None] * 512 + byte[None, None, :]
    scale_start = (tl.program_id(0) * ROW_TILES + row // 16) * groups * 16 + row % 16
    sums_start = token // 8 * (blocks * sums_in_block * 8) + token % 8
    row_limit = tl.cdiv(rows, 16)

    acc = tl.zeros((WARPS, ROW_TILES * 16, TOKEN_TILES * 8), tl.int64)
    for start in range(0, blocks, WARPS * UNROLL * step_blocks):
        bases = ()
        refinements = ()
        activations = ()
        # All loads of the unrolled steps come before the first use: the more bytes are on their
        # way, the less of the memory's latency shows.
        for i in tl.static_range(UNROLL * step_blocks):
            step = i // step_blocks
            block = start + (step * WARPS + warp) * step_blocks + i % step_blocks
            plane_at = base_start + block[:, None, None] * 512
            x_at = x_start + block[:, None, None] * 512
            if EVEN:
                bases = bases + (tl.load(base + plane_at),)
                if OVERLAP:
                    refinements = refinements + (tl.load(refinement + plane_at),)
                activations = activations + (tl.load(x_codes + x_at),)
            else:
                inside = (block < blocks)[:, None, None]
                here = inside & (tile_row < row_limit)[None, :, None]
                bases = bases + (tl.load(base + plane_at, mask=here, other=0),)
                if OVERLAP:
                    refinements = refinements + (
                        tl.load(refinement + plane_at, mask=here, other=0),
                    )
                activations = activations + (tl.load(x_codes + x_at, mask=inside, other=0),)
        for step in tl.static_range(UNROLL):
            first = start + (step * WARPS + warp) * step_blocks
            dot = tl.zeros((WARPS, ROW_TILES * 16, TOKEN_TILES * 8), tl.int32)
            for j in tl.static_range(step_blocks):
                block = first + j
                # rows: tile, half, g; columns: slot, t, byte.
                b = bases[step * step_blocks + j].reshape(WARPS, ROW_TILES, 8, 4, 2, 2, 4)
                b = b.permute(0, 1, 4, 2, 5, 3, 6).reshape(WARPS, ROW_TILES * 16, 32)
                x = activations[step * step_blocks + j].reshape(WARPS, TOKEN_TILES * 8, 4, 2, 2, 4)
                x_low, x_high = tl.split(x.permute(0, 1, 4, 2, 5, 3))
                x_low = x_low.reshape(WARPS, TOKEN_TILES * 8, 32).permute(0, 2, 1)
                x_high = x_high.reshape(WARPS, TOKEN_TILES * 8, 32).permute(0, 2, 1)
                if OVERLAP:
                    r = refinements[step * step_blocks + j].reshape(WARPS, ROW_TILES, 8, 4, 2, 2, 4)
                    r = r.permute(0, 1, 4, 2, 5, 3, 6).reshape(WARPS, ROW_TILES * 16, 32)
                    low = composed_codes(b, r, OVERLAP, False, LOW)
                    high = composed_codes(b, r, OVERLAP, True, HIGH)
                    at = block * (sums_in_block * 8)
                    dot += _load_repaid(x_sums, sums_start, at, block < blocks, OVERLAP, EVEN)
                else:
                    low = base_codes(b, False, LOW)
                    high = base_codes(b, True, HIGH)
                dot = tl.dot(low, x_low, acc=dot, out_dtype=tl.int32)
                if GROUP_SIZE == 32:
                    acc += dot.to(tl.int64) * _load_scale(
                        scale_codes, scale_start, block * 2, groups, row_limit, EVEN
                    )
                    dot = tl.zeros((WARPS, ROW_TILES * 16, TOKEN_TILES * 8), tl.int32)
                    if OVERLAP:
                        at = block * 16 + 8
                        dot += _load_repaid(x_sums, sums_start, at, block < blocks, OVERLAP, EVEN)
                dot = tl.dot(high, x_high, acc=dot, out_dtype=tl.int32)
            group = first * 2 + 1 if GROUP_SIZE == 32 else first // step_blocks
            acc += dot.to(tl.int64) * _load_scale(
                scale_codes, scale_start, group, groups, row_limit, EVEN
            )

    total = tl.sum(acc, axis=0).to(tl.float32)
    n = tl.program_id(0) * ROW_TILES * 16 + row
    # The base alone is read as 16 * q.
    divisor: tl.constexpr = OVERLAP if OVERLAP else 16
    factor = tl.div_rn(tl.load(x_scale + token), tl.full((1,), divisor, tl.float32))
    value = total * (factor[None, :] * tl.load(unit + n, mask=n < rows, other=0)[:, None])
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)[:, None]
    inside = (n < rows)[:, None] & (token < tokens)[None, :]
    tl.store(out + token[None, :] * rows + n[:, None], value, mask=inside)


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
        config: warps, row tiles of a program, steps of which all loads are issued at once.

    Returns:
        ``[M, N]`` of ``dtype``.
    """
    warps, row_tiles, unroll = config
    token_tiles, blocks, _ = x_codes.shape
    step_blocks = 2 if group_size == 128 else 1
    even = (
        blocks % (warps * unroll * step_blocks) == 0
        and base.shape[0] % row_tiles == 0
        and scale_codes.shape[1] * group_size == blocks * BLOCK
    )
    used_overlap = 0 if refinement is None else overlap
    low, high = _assembly(used_overlap)
    out = torch.empty(tokens, rows, dtype=dtype, device=x_codes.device)
    dual_plane_linear_kernel[(triton.cdiv(base.shape[0], row_tiles),)](
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
        rows,
        blocks,
        scale_codes.shape[1],
        GROUP_SIZE=group_size,
        OVERLAP=used_overlap,
        HAS_BIAS=bias is not None,
        TOKEN_TILES=token_tiles,
        ROW_TILES=row_tiles,
        WARPS=warps,
        UNROLL=unroll,
        EVEN=even,
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
