"""Vectors of queries, keys and values as programs hold them: two halves in float32.

They are loaded, rotated, and nested as ``nestq.reference`` does it, to the bit: every operation
rounds once, and divisions are IEEE's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.arguments import FLOATS
from nestq.kernels.rounding import round_half_even

# Up to so many vectors a program, which is one warp, has one of them: that is soonest done.
FEW_VECTORS = 4096
# Of more vectors a thread has eight numbers of each half, in 16 bits one load.
THREAD_COLUMNS = 8


@triton.jit
def load_halves(at, inside, HALF: tl.constexpr):
    """Two times ``[TOKENS, HALF]`` in float32 from pointers to the first halves."""
    low = tl.load(at, mask=inside, other=0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0).to(tl.float32)
    return low, high


@triton.jit
def _turned(x, partner, cos, sin, dtype: tl.constexpr):
    """``x * cos + partner * sin``, each operation rounded to ``dtype``."""
    kept = (x * cos).to(dtype).to(tl.float32)
    turned = (partner * sin).to(dtype).to(tl.float32)
    return (kept + turned).to(dtype).to(tl.float32)


@triton.jit
def rotate_halves(low, high, cos, sin, inside, HALF: tl.constexpr, dtype: tl.constexpr):
    """Vectors of ``dtype`` rotated by the angles at pointers ``[TOKENS, HALF]``."""
    cos_low, cos_high = load_halves(cos, inside, HALF)
    sin_low, sin_high = load_halves(sin, inside, HALF)
    return (
        _turned(low, -high, cos_low, sin_low, dtype),
        _turned(high, low, cos_high, sin_high, dtype),
    )


@triton.jit
def transform_halves(low, high, HALF: tl.constexpr, STEPS: tl.constexpr, dtype: tl.constexpr):
    """Vectors after ``nestq.reference.hadamard``, HALF a power of two, rounded to ``dtype``.

    Columns behind HALF are zeros, and stay apart.
    """
    for step in tl.static_range(STEPS):
        low, high = butterfly(low, 1 << step), butterfly(high, 1 << step)
    scale: tl.constexpr = (2 * HALF) ** -0.5
    first, second = (low + high) * scale, (low - high) * scale
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


@triton.jit
def butterfly(x, HALF: tl.constexpr):
    """Sums and differences of ``[R, C]`` at columns that are HALF apart."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    first, second = tl.split(x.reshape(R, C // (2 * HALF), 2, HALF).permute(0, 1, 3, 2))
    pairs = tl.join(first + second, first - second)
    return pairs.permute(0, 1, 3, 2).reshape(R, C)


@triton.jit
def nested_codes(x, scale, safe):
    """Base and refinement codes of ``[TOKENS, HALF]`` in float32 (paper A.2)."""
    base = round_half_even(tl.div_rn(x, safe))
    base = tl.where(scale > 0, tl.minimum(tl.maximum(base, -8.0), 7.0), 0.0)
    rest = tl.div_rn(x - base * scale, safe) * 16.0
    # The composed code stays in eight bits.
    lowest = tl.where(base == -8.0, 0.0, -8.0)
    fine = tl.minimum(tl.maximum(round_half_even(rest), lowest), 7.0)
    return base, tl.where(scale > 0, fine, 0.0)


@triton.jit
def nibbles(low, high, bias):
    """Codes in float32 as the low and the high nibbles of bytes."""
    low = (low.to(tl.int32) + bias) & 0x0F
    high = (high.to(tl.int32) + bias) & 0x0F
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def nest_halves(low, high, base, refinement, scale, entry, real, column, HALF: tl.constexpr):
    """Nest vectors and write them, where ``real``, as the entries ``[TOKENS]`` of the planes."""
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    # A maximum skips NaN; the vector's scale must not.
    nan = tl.max(((low != low) | (high != high)).to(tl.int32), axis=1) > 0
    step = tl.div_rn(tl.where(nan, float("nan"), largest), 7.0)
    safe = tl.where(step > 0, step, 1.0)[:, None]
    low_base, low_fine = nested_codes(low, step[:, None], safe)
    high_base, high_fine = nested_codes(high, step[:, None], safe)

    inside = real[:, None] & (column < HALF)
    at = entry[:, None] * HALF + column
    tl.store(base + at, nibbles(low_base, high_base, 0), mask=inside)
    tl.store(refinement + at, nibbles(low_fine, high_fine, 8), mask=inside)
    tl.store(scale + entry, step, mask=real)


def padded(half: int) -> int:
    """Columns that a program gives to half a vector: a power of two, one a thread at least."""
    return max(triton.next_power_of_2(half), 32)


def tokens_a_program(vectors: int, columns: int) -> int:
    """Vectors that a program has, of so many in all."""
    return 1 if vectors <= FEW_VECTORS else max(32 * THREAD_COLUMNS // columns, 1)


def check_memory(
    vectors: dict[str, Tensor], whole: dict[str, Tensor], device: torch.device
) -> None:
    """Refuse, by name, what kernels cannot read.

    Args:
        vectors: must be of a dtype in ``FLOATS``, contiguous along the last dimension.
        whole: must be contiguous.
        device: of all of them.
    """
    for name, tensor in vectors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous along D, got strides {tensor.stride()}")
    for name, tensor in whole.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    for name, tensor in (vectors | whole).items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on the device {device}, got {tensor.device}")
