"""Tiles: inverse, complete, and in the order that the module's text gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestq.reference.weights import pack_base, unpack_base
from nestq.tile_layout import tile_activation, tile_plane, tile_scale, untile_plane, untile_scale

GROUP_SIZES = (32, 64, 128)


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from(GROUP_SIZES),
    st.integers(0, 2**31),
)
def test_tiling_is_undone(rows: int, groups: int, group_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plane = torch.randint(
        0, 256, (rows, groups * group_size // 2), dtype=torch.uint8, generator=generator
    )
    tiles = tile_plane(plane, group_size)
    assert tiles.shape == (-(-rows // 16), -(-groups * group_size // 64), 512)
    assert torch.equal(untile_plane(tiles, rows, group_size, groups), plane)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_a_code_lies_where_the_layout_says(group_size: int) -> None:
    rows, columns = 32, 256
    for row, column in ((0, 0), (5, 37), (13, 63), (16, 64), (30, 255), (23, 131)):
        codes = torch.zeros(rows, columns, dtype=torch.int8)
        codes[row, column] = -3
        tiles = tile_plane(pack_base(codes, group_size), group_size)
        half, g = divmod(row % 16, 8)
        high, t, slot, j = column % 64 // 32, column % 32 // 8, column % 8 // 4, column % 4
        byte = 16 * (4 * g + t) + 8 * half + 4 * slot + j
        expected = torch.zeros_like(tiles)
        expected[row // 16, column // 64, byte] = (-3 & 0xF) << (4 * high)
        assert torch.equal(tiles, expected)


def test_an_activation_lies_where_the_layout_says() -> None:
    for token, column in ((0, 0), (3, 37), (11, 99), (12, 70)):
        codes = torch.zeros(13, 100, dtype=torch.int8)
        codes[token, column] = 7
        tiles = tile_activation(codes)
        assert tiles.shape == (2, 2, 512)
        chunk, t, slot, j = column % 64 // 32, column % 32 // 8, column % 8 // 4, column % 4
        expected = torch.zeros_like(tiles)
        expected[
            token // 8, column // 64, 16 * (4 * (token % 8) + t) + 8 * chunk + 4 * slot + j
        ] = 7
        assert torch.equal(tiles, expected)


def test_rows_and_groups_that_fill_no_tile_are_zero() -> None:
    plane = torch.full((17, 16), 0xFF, dtype=torch.uint8)
    tiles = tile_plane(plane, 32)
    codes = unpack_base(untile_plane(tiles, 32, 64, 1), 64)
    assert (codes[:17, :32] == -1).all()
    assert codes[:17, 32:].count_nonzero() == 0
    assert codes[17:].count_nonzero() == 0


def test_scales_lie_by_tile_group_and_pair_of_rows() -> None:
    codes = torch.arange(1, 18 * 3 + 1, dtype=torch.int16).view(18, 3)
    tiles = tile_scale(codes)
    assert tiles.shape == (2, 3, 16)
    assert tiles[0, 2, 2 * 3].equal(codes[3, 2])
    assert tiles[0, 2, 2 * 3 + 1].equal(codes[11, 2])
    assert tiles[1, 2, 2 * 1] == codes[17, 2]
    assert tiles[1].count_nonzero() == 2 * 3
    assert torch.equal(untile_scale(tiles, 18), codes)
