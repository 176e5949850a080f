"""Rotation and writing in one call are those of transformers and of ``kv_append``."""

import pytest
import torch
from nested_kv import Planes, assert_same_bytes, poisoned, random
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nestq.reference.kv import kv_append
from nestq.reference.rotary import rotate_append

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def states(dtype: torch.dtype, head_dim: int = 24) -> list[Tensor]:
    """Queries of 6 heads, keys and values of 2, transposed, of 2 rows and 5 tokens."""
    return [
        random(2, 5, heads, head_dim, seed=seed).transpose(1, 2).to(dtype)
        for seed, heads in enumerate((6, 2, 2))
    ]


def angles(dtype: torch.dtype, rows: int = 2, head_dim: int = 24) -> list[Tensor]:
    half = 10 * random(rows, 5, head_dim // 2)
    return [f(torch.cat((half, half), -1)).to(dtype) for f in (torch.cos, torch.sin)]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_rotation_by_transformers_and_two_appends(dtype: torch.dtype, rows: int) -> None:
    query, key, value = states(dtype)
    cos, sin = angles(dtype, rows)
    positions = torch.tensor([[3, 0, 1, 2, 8], [-2, -1, 0, 5, 4]])
    keys, values, expected_keys, expected_values = (
        poisoned(2, 2, 9, 24, seed=seed) for seed in (0, 1, 0, 1)
    )

    out = rotate_append(query, key, value, cos, sin, positions, *keys, *values)
    expected, rotated_key = apply_rotary_pos_emb(query, key, cos, sin)
    kv_append(rotated_key, positions, *expected_keys)
    kv_append(value, positions, *expected_values)
    assert out.is_contiguous()
    assert torch.equal(out, expected)
    assert_same_bytes(keys, expected_keys)
    assert_same_bytes(values, expected_values)


def test_nothing_is_written_where_an_argument_does_not_fit() -> None:
    query, key, value = states(torch.float32)
    cos, sin = angles(torch.float32)
    positions = torch.arange(5).repeat(2, 1)
    keys, values = poisoned(2, 2, 9, 24), poisoned(2, 2, 9, 24)
    before = Planes(*(plane.clone() for plane in keys))
    arguments = [query, key, value, cos, sin, positions, *keys, *values]
    for place, bad, message in (
        (2, value[:, :, :4], "value must be"),
        (3, cos[..., :12], "cos must be"),
        (5, positions + 5, "positions must be below the cache's capacity 9"),
        (11, values.scale.double(), "value scale must be"),
    ):
        with pytest.raises(ValueError, match=message):
            rotate_append(*arguments[:place], bad, *arguments[place + 1 :])
        assert_same_bytes(keys, before)
