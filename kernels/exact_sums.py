"""Exact sums over groups: the int32 dot product of a group times its scale, added in 64 bits."""

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
