"""Nibbles of nested keys and values to float16, as the operands of a matrix instruction hold them.

A code is an integer in [-136, 127], in steps of s / 16, and exact in float16. Inline assembly makes
two of a 32-bit word at once: a nibble or byte below the exponent of 1024 is the float16 number
1024 + nibble, and one fused multiply-add takes the 1024 away. The plain form computes the same code
by code, for the interpreter.
"""

import triton
import triton.language as tl

# What is read of keys and values, and what a code is made of.
BASE = tl.constexpr(0)  # 16 q
BOTH = tl.constexpr(1)  # 16 q + q_r
RECENT = tl.constexpr(2)  # the one or the other
FINE = tl.constexpr(3)  # q_r
DENSE = tl.constexpr(4)  # 16-bit numbers without planes

_REGISTERS = tl.constexpr(".reg .b32 factor, offset, code, base, fine, word, next;")


@triton.constexpr_function
def _conversion(read, high):
    """Mask, bits to flip, float16 factor and offset that make a nibble or byte a code.

    Base nibbles, and bytes of both planes, are in two's complement: flipping the sign bit adds 8,
    or 128.
    """
    if read == BASE:
        if high:
            return 0xF0, 0x80, 0x3C00, 0xE480  # 1, -(1024 + 128)
        return 0x0F, 0x08, 0x4C00, 0xF408  # 16, -16 * (1024 + 8)
    if read == FINE:
        if high:
            return 0xF0, 0x00, 0x2C00, 0xD480  # 1 / 16, -(1024 + 128) / 16
        return 0x0F, 0x00, 0x3C00, 0xE408  # 1, -(1024 + 8)
    return 0xFF, 0x80, 0x3C00, 0xE488  # 1, -(1024 + 136)


@triton.constexpr_function
def _twice(x):
    """A 16-bit number in both halves of a word."""
    return f"0x{x | x << 16:08X}"


@triton.constexpr_function
def _convert(out, word, read, high):
    """Assembly for the codes in bytes 0 and 2 of a word."""
    mask, flip, factor, offset = _conversion(read, high)
    return (
        f"mov.b32 factor, {_twice(factor)}; mov.b32 offset, {_twice(offset)}; "
        f"lop3.b32 code, {word}, {_twice(mask)}, {_twice(0x6400 | flip)}, 0x6A; "  # (a & b) ^ c
        f"fma.rn.f16x2 {out}, code, factor, offset; "
    )


@triton.constexpr_function
def _nibbles(base, fine, read, high):
    """Assembly for a word with the nibbles of one plane, or bytes ``16 q + q_r + 8`` of both."""
    if read == BOTH:
        shift = f"shr.b32 fine, {fine}, 4; mov.b32 base, {base}; "
        if not high:
            shift = f"shl.b32 base, {base}, 4; mov.b32 fine, {fine}; "
        # lop3 with 0xE4 takes bits of its first operand where the third has ones.
        return shift + "lop3.b32 word, base, fine, 0xF0F0F0F0, 0xE4; "
    return f"mov.b32 word, {base if read == BASE else fine}; "


@triton.constexpr_function
def _assembly(read, high):
    """Two words of each plane to four words, each with a code of both."""
    lines = ""
    for first, order in ((0, "0x5410"), (2, "0x7632")):
        lines += f"prmt.b32 base, $4, $5, {order}; prmt.b32 fine, $6, $7, {order}; "
        lines += _nibbles("base", "fine", read, high) + "shr.b32 next, word, 8; "
        lines += _convert(f"${first}", "word", read, high)
        lines += _convert(f"${first + 1}", "next", read, high)
    return f"{{ {_REGISTERS.value} {lines} }}"


@triton.jit
def codes(base, fine, READ: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Codes ``[A, 4 * B, 2]`` in float16 of the low or high nibbles of words ``[A, B, 2]``.

    The codes of neighbours in the last dimension share a register. Codes count bytes of a word.
    """
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _assembly(READ, HIGH),
            "=r,=r,=r,=r,r,r,r,r",
            [base, fine],
            (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        joined = tl.join(tl.join(a, c), tl.join(b, d)).permute(0, 1, 3, 4, 2)
        return joined.reshape(base.shape[0], base.shape[1] * 4, 2)
    else:
        shift = tl.arange(0, 4)[None, None, None, :] * 8 + (4 if HIGH else 0)
        coarse = ((((base[:, :, :, None] >> shift) & 0x0F) ^ 0x08) - 8) * 16
        code = ((fine[:, :, :, None] >> shift) & 0x0F) - 8
        if READ == BASE:
            code = coarse
        if READ == BOTH:
            code += coarse
        joined = code.to(tl.float16).permute(0, 1, 3, 2)
        return joined.reshape(base.shape[0], base.shape[1] * 4, 2)
