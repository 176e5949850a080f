"""Exact sums over groups, the int32 dot product of each times its scale, and what ends them."""

import triton
import triton.language as tl

# As a multiplication and an addition in halves, compilers make one instruction of it; ``mad.wide``
# they take apart into three for this accumulator.
WIDE_MAD = (
    "{ .reg .b32 l, h; mov.b64 {l, h}, $1; mad.lo.cc.s32 l, $2, $3, l; "
    "madc.hi.s32 h, $2, $3, h; mov.b64 $0, {l, h}; }"
)


def wide_mad() -> str:
    """Assembly for :func:`add_scaled`; nothing where there is no assembly."""
    return "" if triton.knobs.runtime.interpret else WIDE_MAD


@triton.jit
def add_scaled(total, dot, scale, ASM: tl.constexpr):
    """``total + dot * scale`` of int64, int32 and int32 that broadcast."""
    if ASM == "":
        return total + dot.to(tl.int64) * scale.to(tl.int64)
    return tl.inline_asm_elementwise(
        ASM, "=l,l,r,r", [total, dot, scale], dtype=tl.int64, is_pure=True, pack=1
    )


@triton.jit
def scale_sums(total, token_scale, unit, OVERLAP: tl.constexpr):
    """Sums int64 of the target, or of the base as ``16 * q`` (``OVERLAP`` 0), in float32."""
    if OVERLAP == 0:
        total = total >> 4
    elif OVERLAP & (OVERLAP - 1) == 0:
        token_scale *= 1 / OVERLAP
    else:
        token_scale = tl.div_rn(token_scale, tl.full((1,), OVERLAP, tl.float32))
    return total.to(tl.float32) * (token_scale * unit)
