"""Nibbles of packed planes to signed bytes, four at a time.

On a GPU a byte is not a unit of work: inline assembly treats four bytes in a 32-bit word at once.
The plain form computes the same byte by byte, for the interpreter and for other GPUs.
"""

import triton
import triton.language as tl

LOW_BASE = "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }"
HIGH_BASE = "and.b32 $0, $1, 0xF0F0F0F0;"


def compose_asm(overlap: int, high: bool) -> str:
    """Assembly for ``overlap * (q + 8) + (q_r + 8) - 128`` of four low or high nibbles."""
    shift = "shr.b32 b, $1, 4; shr.b32 r, $2, 4;" if high else "mov.b32 b, $1; mov.b32 r, $2;"
    return (
        f"{{ .reg .b32 b, r; {shift} and.b32 b, b, 0x0F0F0F0F; xor.b32 b, b, 0x08080808; "
        f"and.b32 r, r, 0x0F0F0F0F; mad.lo.u32 b, b, {overlap}, r; xor.b32 $0, b, 0x80808080; }}"
    )


@triton.jit
def base_codes(base, HIGH: tl.constexpr, ASM: tl.constexpr):
    """``16 * q`` as int8, of the low or high nibbles of int8 bytes."""
    if ASM == "":
        nibble = base.to(tl.uint8, bitcast=True)
        if HIGH:
            return (nibble & 0xF0).to(tl.int8, bitcast=True)
        return (nibble << 4).to(tl.int8, bitcast=True)
    return tl.inline_asm_elementwise(ASM, "=r,r", [base], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def composed_codes(base, refinement, OVERLAP: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """``overlap * q + q_r + 8 * overlap - 120`` as int8, of the low or high nibbles of bytes."""
    if ASM == "":
        b = base.to(tl.uint8, bitcast=True)
        r = refinement.to(tl.uint8, bitcast=True)
        if HIGH:
            b = b >> 4
            r = r >> 4
        code = ((b & 0x0F) ^ 0x08) * OVERLAP + (r & 0x0F)
        return (code.to(tl.uint8) ^ 0x80).to(tl.int8, bitcast=True)
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [base, refinement], dtype=tl.int8, is_pure=True, pack=4
    )
