"""Writing into the cache and attention in C++ give the reference's bits."""

import itertools
from typing import Any

import pytest
import torch
from same_bits import same_bits
from torch import Tensor

from nestq.cpu import attention as cpu_attention
from nestq.cpu import kv_append as cpu_kv_append
from nestq.cpu.library import compile_library
from nestq.reference.attention import KEY_BLOCK, nested_attention
from nestq.reference.kv import kv_append
from nestq.reference.rotary import rotate_append

Planes = list[Tensor]


@pytest.fixture(scope="module")
def compiled() -> Any:
    return compile_library()


def empty_planes(batch: int, heads: int, capacity: int, head_dim: int) -> Planes:
    """Planes full of what must not be read, or must stay."""
    codes = [
        torch.randint(0, 256, (batch, heads, capacity, head_dim // 2), dtype=torch.uint8)
        for _ in range(2)
    ]
    return [*codes, torch.randn(batch, heads, capacity)]


def awkward_states(batch: int, heads: int, count: int, head_dim: int) -> Tensor:
    states = torch.randn(batch, heads, count, head_dim) * torch.rand(batch, heads, count, 1)
    states[0, 0, 0] = 0
    states[0, 0, 1] = torch.finfo(torch.float32).smallest_normal / 4
    states[0, 0, 2] = torch.arange(head_dim) - 7.0  # exact in steps of the scale, or halfway
    return states


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [2, 24, 64, 256])
def test_planes_of_the_reference(compiled: Any, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    states = awkward_states(3, 2, 6, head_dim)
    states[1, 0, 0, 0] = torch.nan
    states[1, 1, 3, 1] = -torch.inf
    states = states.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    positions = torch.stack([torch.randperm(9)[:6] for _ in range(3)])
    positions[0, ::4] = -1
    positions[2] = -5
    expected = empty_planes(3, 2, 9, head_dim)
    planes = [plane.clone() for plane in expected]
    kv_append(states, positions, *expected)
    cpu_kv_append.kv_append(compiled, states, positions, *planes)
    assert all(same_bits(*pair) for pair in zip(planes, expected, strict=True))


def filled(batch: int, heads: int, capacity: int, head_dim: int) -> Planes:
    planes = empty_planes(batch, heads, capacity, head_dim)
    states = awkward_states(batch, heads, capacity, head_dim)
    kv_append(states, torch.arange(capacity).expand(batch, capacity), *planes)
    return planes


def check_attention(
    compiled: Any, query: Tensor, positions: Tensor, keys: Planes, values: Planes
) -> None:
    sparse = ((0, 0), (2, 4), (5, 40))
    choices = itertools.product((True, False), (0, 3), (0, 2), sparse)
    for refined, window, recent, reach in choices:
        given = [
            [planes[0], planes[1] if refined else None, planes[2]] for planes in (keys, values)
        ]
        arguments = (*given[0], *given[1], 0.3, window, recent, *reach)
        out = cpu_attention.nested_attention(compiled, query, positions, *arguments)
        assert same_bits(out, nested_attention(query, positions, *arguments))


@pytest.mark.parametrize("head_dim", [2, 24, 64, 96])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention_of_the_reference(
    compiled: Any, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(tokens + heads + head_dim)
    keys, values = (filled(3, kv_heads, 50, head_dim) for _ in range(2))
    query = torch.randn(3, tokens, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    query[0, 0, 0] = 0
    positions = torch.tensor([[44], [3], [-tokens]]) + torch.arange(tokens)
    check_attention(compiled, query, positions, keys, values)


@pytest.mark.parametrize("used", [KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK + 40])
def test_attention_over_blocks_of_keys(compiled: Any, used: int) -> None:
    torch.manual_seed(used)
    keys, values = (filled(1, 1, used + 3, 16) for _ in range(2))
    positions = torch.tensor([[used - 2, used - 1]])
    check_attention(compiled, torch.randn(1, 3, 2, 16), positions, keys, values)


# A scale is never negative.
@pytest.mark.parametrize(
    ("where", "bad"),
    [
        ("query", -torch.inf),
        *((where, bad) for where in ("query", "key", "value") for bad in (torch.nan, torch.inf)),
    ],
)
def test_attention_of_what_is_not_finite(compiled: Any, where: str, bad: float) -> None:
    keys, values = (filled(1, 2, 20, 16) for _ in range(2))
    query = torch.randn(1, 2, 2, 16)
    if where == "query":
        query[0, 0, 0, 3] = bad
    else:
        (keys if where == "key" else values)[2][0, 0, 12] = bad
    check_attention(compiled, query, torch.tensor([[11, 12]]), keys, values)


def test_the_operators_take_any_layout() -> None:
    keys, values = (filled(2, 2, 40, 16) for _ in range(2))
    rows = [plane[:, :, ::2] for plane in (*keys, *values)]
    dense = [plane.contiguous() for plane in rows]
    query, positions = torch.randn(2, 4, 3, 16), torch.tensor([[3, 4, 5], [17, 18, 19]])
    out = torch.ops.nestq.nested_attention(query, positions, *rows, 0.25, 0, 0)
    assert same_bits(out, nested_attention(query, positions, *dense, 0.25, 0, 0))

    states = torch.randn(2, 2, 3, 16)
    torch.ops.nestq.kv_append(states, positions, *rows[:3])
    kv_append(states, positions, *dense[:3])
    written = [plane.contiguous() for plane in rows[:3]]
    assert all(same_bits(*pair) for pair in zip(written, dense[:3], strict=True))


def test_positions_out_of_the_cache_are_refused(compiled: Any) -> None:
    planes = filled(1, 1, 8, 16)
    positions = torch.tensor([[8]])
    with pytest.raises(ValueError, match="below the cache's capacity 8, got 8"):
        cpu_kv_append.kv_append(compiled, torch.randn(1, 1, 1, 16), positions, *planes)
    with pytest.raises(ValueError, match="below the cache's capacity 8, got 8"):
        cpu_attention.nested_attention(
            compiled, torch.randn(1, 1, 1, 16), positions, *planes, *planes, 1.0, 0, 0
        )


def test_rotating_and_appending() -> None:
    torch.manual_seed(0)
    expected = [*empty_planes(2, 2, 9, 16), *empty_planes(2, 2, 9, 16)]
    planes = [plane.clone() for plane in expected]
    query, key, value = (torch.randn(2, heads, 3, 16).bfloat16() for heads in (4, 2, 2))
    angles = torch.randn(2, 3, 16)
    positions = torch.tensor([[-1, 0, 1], [5, 7, 6]])
    given = (query, key, value, angles.cos().bfloat16(), angles.sin().bfloat16(), positions)
    out = torch.ops.nestq.rotate_append(*given, *planes)
    assert same_bits(out, rotate_append(*given, *expected))
    assert all(same_bits(*pair) for pair in zip(planes, expected, strict=True))
