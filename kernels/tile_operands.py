"""A tile's codes and scales as the tensor cores' left operand has its rows and columns."""

import triton
import triton.language as tl


@triton.jit
def left_operand(codes, TILES: tl.constexpr):
    """``[TILES, 16, 32]`` of tiles ``[TILES, 512]``: rows by half, g; columns by slot, t, byte."""
    codes = codes.reshape(TILES, 8, 4, 2, 2, 4).permute(0, 3, 1, 4, 2, 5)
    return codes.reshape(TILES, 16, 32)


@triton.jit
def row_scales(words, TILES: tl.constexpr):
    """Scale codes int32 ``[TILES, 16]`` of words ``[TILES, 8]`` with those of rows g and g + 8."""
    halves = tl.join((words << 16) >> 16, words >> 16)
    return halves.permute(0, 2, 1).reshape(TILES, 16)
