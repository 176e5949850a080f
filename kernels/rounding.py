"""Rounding to the nearest integer, halves to even, as PyTorch rounds."""

import triton
import triton.language as tl


@triton.jit
def round_half_even(x):
    """Nearest integer for ``|x| < 2 ** 22``: beside the shift no bit is left for a fraction."""
    shift: tl.constexpr = 12582912.0  # 1.5 * 2 ** 23
    return (x + shift) - shift
