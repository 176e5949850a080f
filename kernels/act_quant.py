"""Per-token INT8 or INT4 quantization of activations, alone or fused with what comes just before it.

A program reads a whole token to know its scale, and writes the codes of a share of it in the tiles
that ``dual_plane_linear`` reads, with the sums of codes that pay for the offset of composed weight
codes. A token is shared out because a single multiprocessor takes long to compute its codes. Fused
forms round to the dtype of the activations where the layers that they replace do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.rounding import round_half_even
from nestq.reference import linear as reference
from nestq.tile_layout import BLOCK, TILE_BYTES, TILE_TOKENS

SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)
# Columns that a program holds at a time, and those of which it writes the codes.
CHUNK = 4096
SHARE = 1024
# Up to so many tokens, their shares are computed by programs of their own.
FEW_TOKENS = 16


@triton.jit
def _load_inputs(x, other, norm_weight, column, size, ADD: tl.constexpr, NORM: tl.constexpr):
    """In some columns of a token: x, or its sum with the residual; the gate; the norm's weight."""
    inside = column < size
    value = tl.load(x + column, mask=inside, other=0)
    partner = tl.load(other + column, mask=inside, other=0)
    weight = value
    if NORM:
        weight = tl.load(norm_weight + column, mask=inside, other=0)
    if ADD:
        value += partner
    return value, partner, weight


@triton.jit
def _activated(value, gate, GATE: tl.constexpr):
    """The value, or ``silu(gate) * value``, in float32."""
    dtype: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    if GATE:
        gate = gate.to(tl.float32)
        activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
        value = (activated * value).to(dtype).to(tl.float32)
    return value


@triton.jit
def _normed(value, weight, factor, NORM: tl.constexpr):
    if NORM:
        dtype: tl.constexpr = weight.dtype
        value = ((value * factor).to(dtype) * weight).to(dtype).to(tl.float32)
    return value


@triton.jit
def act_quant_kernel(
    x,  # [M, K]
    other,  # residual or gate [M, K], or x
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
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHARE: tl.constexpr,
    SUM_WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    IN_ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    CLIP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    x += token * x_stride
    other += token * other_stride
    values = ()
    weights = ()
    for i in tl.static_range(CHUNKS):
        every = i * CHUNK + tl.arange(0, CHUNK)
        loaded = _load_inputs(x, other, norm_weight, every, size, ADD, NORM)
        values = values + (_activated(loaded[0], loaded[1], GATE),)
        weights = weights + (loaded[2],)
    factor = 1.0
    if NORM:
        squares = values[0] * values[0]  # type: ignore[misc]
        for i in tl.static_range(1, CHUNKS):
            squares += values[i] * values[i]
        factor = tl.rsqrt(tl.sum(squares, axis=0) / size + eps)
    # As integers, so that NaN is the largest of all and the token's result is NaN too.
    largest = tl.zeros((CHUNK,), tl.int32)
    for i in tl.static_range(CHUNKS):
        bits = _normed(values[i], weights[i], factor, NORM).to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, bits & 0x7FFFFFFF)
    reach = tl.max(largest, axis=0).to(tl.float32, bitcast=True) * CLIP
    step = tl.div_rn(reach, LEVELS)
    inverse = tl.div_rn(1.0, tl.where(step > SMALLEST_SCALE, step, 1.0))

    width = blocks * 64
    for start in range(tl.program_id(1) * SHARE, width, tl.num_programs(1) * SHARE):
        own = start + tl.arange(0, SHARE)
        value, gate, weight = _load_inputs(x, other, norm_weight, own, size, ADD, NORM)
        if ADD:
            tl.store(total + token * size + own, value, mask=own < size)
        value = _normed(_activated(value, gate, GATE), weight, factor, NORM)
        rounded = round_half_even(value * inverse)
        code = tl.minimum(tl.maximum(rounded, -LEVELS), LEVELS).to(tl.int8)
        # Neighbours in fours stay neighbours: a word is stored at once.
        bytes_ = (code.to(tl.int32) & 0xFF).reshape(SHARE // 4, 4)
        word = tl.sum(bytes_ << (8 * tl.arange(0, 4))[None, :], axis=1)
        column = start + 4 * tl.arange(0, SHARE // 4)
        block = column // 64
        words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
        if IN_ROWS:
            place = column // 32 * 32 + column % 8 // 4 * 16 + column % 32 // 8 * 4
            tl.store(words + (token * width + place) // 4, word, mask=block < blocks)
        else:
            tile = token // 8
            row = token % 8
            place = column % 32 // 8 * 16 + column % 64 // 32 * 8 + column % 8
            at = (tile * blocks + block) * 512 + row * 64 + place
            tl.store(words + at // 4, word, mask=block < blocks)
            grouped = code.to(tl.int32).reshape(SHARE // SUM_WIDTH, SUM_WIDTH)
            part = start // SUM_WIDTH + tl.arange(0, SHARE // SUM_WIDTH)
            parts = blocks * (64 // SUM_WIDTH)
            at = (tile * parts + part) * 8 + row
            tl.store(sums + at, tl.sum(grouped, axis=1), mask=part < parts)
    if tl.program_id(1) == 0:
        tl.store(scale + token, step)


def act_quant(
    x: Tensor,
    group_size: int = BLOCK,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: Tensor | None = None,
    in_rows: bool = False,
    bits: int = 8,
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
        bits: of the codes, 8 or 4; they take a byte each.

    Returns:
        codes int8 ``[ceil(M / 8), blocks, 512]``, blocks of 64 columns in whole groups; sums int32
        ``[ceil(M / 8), parts, 8]`` of the codes of each block, or half a block for groups of 32;
        scale float32 ``[ceil(M / 8) * 8]``; and ``x + residual``, which is x itself where there is
        none. Entries of tokens beyond M are not written.
    """
    levels, share_of_largest = reference.ACTIVATION_LEVELS[bits]
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
    width = max(triton.next_power_of_2(blocks * BLOCK), 128)
    chunk, share = min(width, CHUNK), min(width, SHARE)
    shares = triton.cdiv(blocks * BLOCK, share)
    act_quant_kernel[(tokens, shares if tokens <= FEW_TOKENS else 1)](
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
        x.stride(0) if other is None else other.stride(0),
        CHUNK=chunk,
        CHUNKS=triton.cdiv(size, chunk),
        SHARE=share,
        SUM_WIDTH=sum_width,
        ADD=residual is not None,
        NORM=norm_weight is not None,
        GATE=gate is not None,
        IN_ROWS=in_rows,
        LEVELS=float(levels),
        CLIP=share_of_largest,
        num_warps=max(chunk // 512, 1),
        enable_fp_fusion=False,
    )
    return codes, sums, scale, total
