"""The order in which GPU kernels read planes: tiles that a warp loads straight into tensor cores.

A tile holds 16 weight rows and a block of 64 columns in 512 bytes. The matrix instruction m16n8k32
wants from each lane of a warp the codes of two rows, and here every lane finds all of its codes in
16 neighbouring bytes: a plane is read in order, 16 bytes a lane, and no value changes lanes.
With ``lane = 4 * g + t``, byte ``16 * lane + 8 * half + 4 * slot + j`` holds in its low nibble the
code of row ``g + 8 * half`` and column ``8 * t + 4 * slot + j`` and in its high nibble that of the
same row, 32 columns on.

The scales of rows g and g + 8 lie side by side, so that a lane reads both in one 32-bit word.

Activations come in tiles of 8 tokens and 64 columns in the same order: byte ``16 * lane + 8 * chunk
+ 4 * slot + j`` holds token g, column ``32 * chunk + 8 * t + 4 * slot + j``.
"""

import torch.nn.functional as F
from torch import Tensor

from nestq.reference.weights import pack_nibbles, unpack_nibbles

TILE_ROWS = 16
TILE_TOKENS = 8
BLOCK = 64
TILE_BYTES = 512


def _pad(x: Tensor, rows: int, columns: int = 1) -> Tensor:
    """Pad a matrix with zeros to multiples of rows and columns."""
    return F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def tile_plane(plane: Tensor, group_size: int) -> Tensor:
    """Canonical plane uint8 ``[N, Kp / 2]`` to uint8 ``[ceil(N / 16), ceil(Kp / 64), 512]``."""
    packed = pack_nibbles(_pad(unpack_nibbles(plane, group_size), TILE_ROWS, BLOCK), BLOCK)
    row_tiles, blocks = packed.shape[0] // TILE_ROWS, packed.shape[1] // (BLOCK // 2)
    tiles = packed.view(row_tiles, 2, 8, blocks, 4, 2, 4)
    return tiles.permute(0, 3, 2, 4, 1, 5, 6).reshape(row_tiles, blocks, TILE_BYTES)


def untile_plane(tiles: Tensor, rows: int, group_size: int, groups: int) -> Tensor:
    """Inverse of :func:`tile_plane`: canonical plane uint8 ``[rows, groups * group_size / 2]``."""
    parts = tiles.view(*tiles.shape[:2], 8, 4, 2, 2, 4).permute(0, 4, 2, 1, 3, 5, 6)
    packed = parts.reshape(tiles.shape[0] * TILE_ROWS, tiles.shape[1] * BLOCK // 2)
    nibbles = unpack_nibbles(packed, BLOCK)
    return pack_nibbles(nibbles[:rows, : groups * group_size], group_size)


def tile_scale(codes: Tensor) -> Tensor:
    """Scale codes int16 ``[N, G]`` to ``[ceil(N / 16), G, 16]``; g + 8 * half at 2 * g + half."""
    padded = _pad(codes, TILE_ROWS)
    row_tiles, groups = padded.shape[0] // TILE_ROWS, padded.shape[1]
    tiles = padded.view(row_tiles, 2, TILE_ROWS // 2, groups)
    return tiles.permute(0, 3, 2, 1).reshape(row_tiles, groups, TILE_ROWS)


def untile_scale(tiles: Tensor, rows: int) -> Tensor:
    """Inverse of :func:`tile_scale`: ``[rows, G]``."""
    halves = tiles.unflatten(2, (TILE_ROWS // 2, 2))
    return halves.permute(0, 3, 2, 1).flatten(0, 2)[:rows]


def canonical_planes(
    base: Tensor, refinement: Tensor | None, scale: Tensor, unit: Tensor, group_size: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Base and refinement uint8 ``[N, Kp / 2]`` and float32 scale ``[N, G]`` of planes in tiles."""
    rows, groups = unit.shape[0], scale.shape[1]
    canonical_base = untile_plane(base, rows, group_size, groups)
    canonical_refinement = None
    if refinement is not None:
        canonical_refinement = untile_plane(refinement, rows, group_size, groups)
    return canonical_base, canonical_refinement, untile_scale(scale, rows).float() * unit[:, None]


def tile_activation(codes: Tensor) -> Tensor:
    """Activation codes int8 ``[M, K]`` to tiles int8 ``[ceil(M / 8), ceil(K / 64), 512]``."""
    padded = _pad(codes, TILE_TOKENS, BLOCK)
    tiles = padded.view(padded.shape[0] // 8, 8, padded.shape[1] // BLOCK, 2, 4, 2, 4)
    return tiles.permute(0, 2, 1, 4, 3, 5, 6).reshape(*tiles.shape[:1], -1, TILE_BYTES)
