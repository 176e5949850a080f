"""Linear layer on nested planes for few tokens: exact INT8 arithmetic at the speed of the memory.

Planes, scales and activations lie in tiles (``nestq.tile_layout``), so that each warp reads its
operands of the matrix instruction as they lie. A program computes some tiles of 16 weight rows at
once. Its warps share the blocks of 64 columns, one block a warp and step, and the loads of several
steps are in flight. Only after the last step are the warps' sums added. Sums are exact 64-bit
integers: neither this division of labour nor the number of tokens changes a bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.configurations import choose
from nestq.kernels.exact_sums import add_scaled, scale_sums, wide_mad
from nestq.kernels.planes import HIGH_BASE, LOW_BASE, base_codes, compose_asm, composed_codes
from nestq.kernels.tile_operands import left_operand, row_scales

MAX_TOKENS = 64


class LinearConfig(NamedTuple):
    """How the work is divided: any choice gives the same bits."""

    warps: int
    """Warps of a program, which share the blocks of 64 columns."""
    tiles: int
    """Tiles of 16 rows that a program computes, a power of two."""
    stages: int
    """Steps whose loads are in flight, that of the present one included."""


CANDIDATES = [
    LinearConfig(4, 1, 4),
    LinearConfig(4, 2, 3),
    LinearConfig(4, 4, 3),
    LinearConfig(8, 1, 4),
    LinearConfig(8, 2, 4),
    LinearConfig(16, 1, 3),
]


@triton.jit
def _load(pointer, inside, ALL_INSIDE: tl.constexpr):
    """Zeros outside; without a mask where the compiler knows that there is no outside."""
    if ALL_INSIDE:
        return tl.load(pointer)
    return tl.load(pointer, mask=inside, other=0)


@triton.jit
def _weight_codes(
    base,
    refinement,
    HIGH: tl.constexpr,
    OVERLAP: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Left operand ``[WARPS, 16, 32]`` of the draft or, with an overlap, the target."""
    b = left_operand(base, WARPS)
    if OVERLAP:
        return composed_codes(b, left_operand(refinement, WARPS), OVERLAP, HIGH, ASM)
    return base_codes(b, HIGH, ASM)


@triton.jit
def _activation_codes(x, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Right operands ``[WARPS, 32, TOKENS]`` of the low and of the high nibbles."""
    x = x.reshape(WARPS, TOKENS, 4, 2, 2, 4).permute(0, 1, 4, 2, 5, 3)
    low, high = tl.split(x)
    low = low.reshape(WARPS, TOKENS, 32).permute(0, 2, 1)
    return low, high.reshape(WARPS, TOKENS, 32).permute(0, 2, 1)


@triton.jit
def _one_of_two(dot, WARPS: tl.constexpr, SINGLE: tl.constexpr):
    """``[WARPS, 16, 8]``, or every other column where there is a single token."""
    if SINGLE:
        dot, _ = tl.split(dot.reshape(WARPS, 16, 4, 2))
    return dot


@triton.jit
def _add_products(
    total,
    base,
    refinement,
    scales,
    activation,
    repaid,
    GROUP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    SINGLE: tl.constexpr,
    WARPS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MAD: tl.constexpr,
):
    """Add a block's share to the sums int64 ``[WARPS, 16, 8]`` of a tile of rows and of tokens."""
    x_low, x_high = _activation_codes(activation, 8, WARPS)
    low = _weight_codes(base, refinement, False, OVERLAP, WARPS, LOW)
    high = _weight_codes(base, refinement, True, OVERLAP, WARPS, HIGH)
    zeros = tl.zeros((WARPS, 16, 8), tl.int32)
    dot = zeros + repaid[0] if OVERLAP else zeros
    dot = tl.dot(low, x_low, acc=dot, out_dtype=tl.int32)
    if GROUP_SIZE == 32:
        total = add_scaled(total, _one_of_two(dot, WARPS, SINGLE), scales[0], MAD)
        dot = zeros + repaid[1] if OVERLAP else zeros
        dot = tl.dot(high, x_high, acc=dot, out_dtype=tl.int32)
        return add_scaled(total, _one_of_two(dot, WARPS, SINGLE), scales[1], MAD)
    dot = tl.dot(high, x_high, acc=dot, out_dtype=tl.int32)
    return add_scaled(total, _one_of_two(dot, WARPS, SINGLE), scales[0], MAD)


@triton.jit
def _stack(parts, WARPS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """A power of two of ``[WARPS, 16, COLUMNS]`` side by side, in a new last dimension."""
    for level in tl.static_range(COUNT.bit_length() - 1):
        joined = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            joined = joined + (tl.join(parts[i], parts[i + (COUNT >> (level + 1))]),)
        parts = joined
    return parts[0].reshape(WARPS, 16, COLUMNS, COUNT)


@triton.jit
def _sum_over_warps(x, WARPS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """``[WARPS, 16, COLUMNS, COUNT]`` to ``[16, COLUMNS, COUNT]``, by halves.

    A reduction along warps would write to shared memory with bank conflicts; splitting a dimension
    of two exchanges values without.
    """
    x = x.permute(1, 2, 3, 0)
    for level in tl.static_range(WARPS.bit_length() - 1):
        halves = x.reshape(16, COLUMNS, COUNT, 2, WARPS >> (level + 1))
        low, high = tl.split(halves.permute(0, 1, 2, 4, 3))
        x = low + high
    return x.reshape(16, COLUMNS, COUNT)


@triton.jit
def dual_plane_linear_kernel(
    x_codes,  # int8 [T, blocks, 512]
    x_sums,  # int32 [T, blocks * 64 / min(group size, 64), 8]
    x_scale,  # float32 [T * 8]
    base,  # int8 [tiles, blocks, 512]
    refinement,  # the same, or unused
    scale_codes,  # int32 [tiles, groups, 8], two codes a word
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
    TOKEN_TILES: tl.constexpr,
    SINGLE: tl.constexpr,  # one token: the other one of each pair of columns is left out
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MAD: tl.constexpr,
):
    # Whether every step has a block, and every block a group, for every warp.
    EVEN: tl.constexpr = BLOCKS % WARPS == 0 and BLOCKS * 64 == GROUPS * GROUP_SIZE
    parts: tl.constexpr = 2 if GROUP_SIZE == 32 else 1
    # The last program computes some tiles again rather than fewer.
    tile = tl.minimum(tl.program_id(0) * TILES, tl.cdiv(rows, 16) - TILES).to(tl.int64)
    warp = tl.arange(0, WARPS)
    byte = tl.arange(0, 512)[None, :]
    COLUMNS: tl.constexpr = 4 if SINGLE else 8
    token = tl.arange(0, 8)
    base += tile * BLOCKS * 512
    refinement += tile * BLOCKS * 512
    scale_codes += tile * GROUPS * 8
    word = tl.arange(0, 8)[None, :]
    # What the last step multiplies by is loaded first: rows, tokens, and pairs of tiles of both.
    pair = tl.arange(0, TILES * TOKEN_TILES)[None, None, :]
    n = (tile + pair // TOKEN_TILES) * 16 + tl.arange(0, 16)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, :, None]
    m = pair % TOKEN_TILES * 8 + column * (8 // COLUMNS)
    row_factor = tl.load(unit + n, mask=n < rows, other=0)
    token_factor = tl.load(x_scale + m, mask=m < tokens, other=0)
    if HAS_BIAS:
        row_bias = tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)

    sums = ()
    for _ in tl.static_range(TILES * TOKEN_TILES):
        sums = sums + (tl.zeros((WARPS, 16, COLUMNS), tl.int64),)
    for step in tl.range(0, (BLOCKS + WARPS - 1) // WARPS, num_stages=STAGES):
        block = step * WARPS + warp
        inside = (block < BLOCKS)[:, None]
        activations = ()
        repaid = ()
        for t in tl.static_range(TOKEN_TILES):
            valid = (t * 8 + byte // 64 < tokens) & inside
            at = (t * BLOCKS + block[:, None]) * 512 + byte
            activations = activations + (tl.load(x_codes + at, mask=valid, other=0),)
            token_sums = ()
            for part in tl.static_range(parts):
                if OVERLAP:
                    at = ((t * BLOCKS + block[:, None]) * parts + part) * 8 + token[None, :]
                    valid = (t * 8 + token < tokens)[None, :] & inside
                    loaded = tl.load(x_sums + at, mask=valid, other=0)
                    token_sums = token_sums + ((loaded * (120 - 8 * OVERLAP))[:, None, :],)
            repaid = repaid + (token_sums,)
        updated = ()
        for i in tl.static_range(TILES):
            at = (i * BLOCKS + block[:, None]) * 512 + byte
            base_tile = _load(base + at, inside, EVEN)
            refinement_tile = base_tile
            if OVERLAP:
                refinement_tile = _load(refinement + at, inside, EVEN)
            scales = ()
            for part in tl.static_range(parts):
                group = (block * 64 + part * 32) // GROUP_SIZE
                at = (i * GROUPS + group[:, None]) * 8 + word
                loaded = _load(scale_codes + at, (group < GROUPS)[:, None], EVEN)
                scales = scales + (row_scales(loaded, WARPS)[:, :, None],)
            for t in tl.static_range(TOKEN_TILES):
                total = _add_products(
                    sums[i * TOKEN_TILES + t],
                    base_tile, refinement_tile, scales, activations[t], repaid[t],
                    GROUP_SIZE, OVERLAP, SINGLE, WARPS, LOW, HIGH, MAD,
                )  # fmt: skip
                updated = updated + (total,)
        sums = updated

    COUNT: tl.constexpr = TILES * TOKEN_TILES
    total = _sum_over_warps(_stack(sums, WARPS, COLUMNS, COUNT), WARPS, COLUMNS, COUNT)
    value = scale_sums(total, token_factor, row_factor, OVERLAP)
    if HAS_BIAS:
        value += row_bias
    tl.store(out + m.to(tl.int64) * rows + n, value, mask=(n < rows) & (m < tokens))


def dual_plane_linear(
    x_codes: Tensor,
    x_sums: Tensor,
    x_scale: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale_codes: Tensor,
    unit: Tensor,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
    out: Tensor,
    config: LinearConfig | None = None,
) -> None:
    """``x @ W.T + bias`` of quantized activations in tiles and planes in tiles.

    Args:
        x_codes: int8 ``[T, blocks, 512]``, T tiles of 8 tokens.
        x_sums: int32 ``[T, blocks, 8]`` sums of the codes of a block; of each half of a block,
            ``[T, 2 * blocks, 8]``, for groups of 32.
        x_scale: float32 ``[T * 8]``.
        base: uint8 ``[ceil(N / 16), blocks, 512]``.
        refinement: the same, or None for the draft's weight.
        scale_codes: int16 ``[ceil(N / 16), G, 16]``.
        unit: float32 ``[N]``.
        bias: ``[N]`` or None.
        group_size: codes that share a scale.
        overlap: base steps are divided in this many target steps.
        out: ``[M, N]``, contiguous, of at most 64 tokens; written.
        config: how the work is divided; None chooses by shape.
    """
    tokens, rows = out.shape
    tiles, blocks, _ = base.shape
    used_overlap = 0 if refinement is None else overlap
    low, high = _assembly(used_overlap)

    def launch(config: LinearConfig) -> None:
        # The last program goes back to have as many tiles as the others.
        tiles_a_program = min(config.tiles, 1 << (tiles.bit_length() - 1))
        dual_plane_linear_kernel[(triton.cdiv(tiles, tiles_a_program),)](
            x_codes,
            x_sums,
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
            TOKEN_TILES=triton.next_power_of_2(triton.cdiv(tokens, 8)),
            SINGLE=tokens == 1,
            TILES=tiles_a_program,
            WARPS=config.warps,
            STAGES=config.stages,
            LOW=low,
            HIGH=high,
            MAD=wide_mad(),
            num_warps=config.warps,
            enable_fp_fusion=False,
        )

    launch(config or _choose(tiles, blocks, refinement is not None, tokens, launch, out.device))


def _choose(
    tiles: int,
    blocks: int,
    both: bool,
    tokens: int,
    launch: Callable[[LinearConfig], None],
    device: torch.device,
) -> LinearConfig:
    # Small weights are not worth a measurement.
    if tiles * blocks < 4096:
        return guess(tiles, tokens)
    candidates = [guess(tiles, tokens), *CANDIDATES]
    return choose(
        "dual_plane_linear", bucket(tiles, blocks, both, tokens), candidates, launch, device
    )


def guess(tiles: int, tokens: int) -> LinearConfig:
    """A configuration that every supported GPU has the shared memory for."""
    if tokens > 8:
        return LinearConfig(4, 1, 3)
    return LinearConfig(8, 1, 4) if tiles <= 512 else LinearConfig(4, 2, 3)


def bucket(tiles: int, blocks: int, both: bool, tokens: int) -> str:
    """Name of the shapes that share a configuration."""
    tokens, tiles, blocks = (triton.next_power_of_2(n) for n in (tokens, tiles, blocks))
    tokens = tokens if tokens == 1 else max(tokens, 8)
    planes = "both planes" if both else "base"
    return f"{planes}, {tokens} tokens, {tiles} x {blocks} tiles"


def _assembly(overlap: int) -> tuple[str, str]:
    """How four low and four high nibbles are unpacked; nothing where there is no assembly."""
    if triton.knobs.runtime.interpret:
        return "", ""
    if overlap == 0:
        return LOW_BASE, HIGH_BASE
    return compose_asm(overlap, high=False), compose_asm(overlap, high=True)
