"""The cache's operators as torch.library sees them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.reference.attention import nested_attention
from nestq.reference.kv import quantize_kv


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention_arguments(refinement: bool, strided: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    keys, values = (list(quantize_kv(random(2, 2, 9, 16, seed=seed))) for seed in (0, 1))
    if not refinement:
        keys[1] = values[1] = None
    query = random(2, 3, 4, 16).transpose(1, 2) if strided else random(2, 4, 3, 16)
    positions = torch.tensor([[6, 7, 8], [-1, 0, 1]])
    return query.to(dtype), positions, *keys, *values, 0.25, 5, 2, 1, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("refinement", [False, True])
def test_nested_attention_is_a_sound_operator(
    refinement: bool, strided: bool, dtype: torch.dtype
) -> None:
    arguments = attention_arguments(refinement, strided, dtype)

    torch.library.opcheck(torch.ops.nestq.nested_attention.default, arguments)
    out = torch.ops.nestq.nested_attention(*arguments)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, nested_attention(*arguments))


def test_kv_append_is_a_sound_operator() -> None:
    planes = quantize_kv(random(2, 2, 9, 16))
    arguments = random(2, 2, 3, 16), torch.tensor([[6, 7, 8], [-1, 0, 1]]), *planes

    torch.library.opcheck(torch.ops.nestq.kv_append.default, arguments)


def test_kv_append_writes_the_planes_it_is_given() -> None:
    states = random(2, 2, 3, 16)
    planes = [torch.zeros_like(plane) for plane in quantize_kv(states)]
    torch.ops.nestq.kv_append(states, torch.arange(3).repeat(2, 1), *planes)

    assert all(map(torch.equal, planes, quantize_kv(states)))


def rotate_append_arguments(dtype: torch.dtype) -> list[Tensor]:
    """Strided states of 2 rows and 3 tokens, the second row begins with a pad, and the planes."""
    merged = random(2, 3, 8, 16).transpose(1, 2).to(dtype)
    angles = random(1, 3, 8).repeat(2, 1, 2)
    keys, values = (quantize_kv(random(2, 2, 9, 16, seed=seed)) for seed in (1, 2))
    rotation = [angles.cos().to(dtype), angles.sin().to(dtype)]
    positions = torch.tensor([[6, 7, 8], [-1, 0, 1]])
    return [*merged.split([4, 2, 2], 1), *rotation, positions, *keys, *values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_append_is_a_sound_operator(dtype: torch.dtype) -> None:
    arguments = tuple(rotate_append_arguments(dtype))

    torch.library.opcheck(torch.ops.nestq.rotate_append.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_hadamard_is_a_sound_operator(strided: bool, dtype: torch.dtype) -> None:
    x = random(2, 3, 4, 80).to(dtype)
    x = x.transpose(1, 2) if strided else x

    torch.library.opcheck(torch.ops.nestq.hadamard.default, (x,))


@torch.no_grad()
def test_rotate_append_and_attention_are_compiled_in_order() -> None:
    """The planes are inputs of the graph, and attention reads what was just written."""

    def attend(merged: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> Tensor:
        positions, *planes = rest
        states = (2 * merged).split([4, 2, 2], 1)
        query = torch.ops.nestq.rotate_append(*states, -sin, -cos, positions, *planes)
        out = torch.ops.nestq.nested_attention(query + 1, positions, *planes, 0.25, 0, 0)
        states = (3 * merged).split([4, 2, 2], 1)
        query = torch.ops.nestq.rotate_append(*states, cos, sin, positions, *planes)
        return out + torch.ops.nestq.nested_attention(query, positions, *planes, 0.25, 0, 0)

    query, key, value, *rest = rotate_append_arguments(torch.float32)
    merged = torch.cat((query, key, value), 1)
    others = [tensor.clone() for tensor in rest]
    expected = attend(merged, *rest)
    out = torch.compile(attend, fullgraph=True)(merged, *others)
    assert torch.equal(out, expected)
    for ours, theirs in zip(others, rest, strict=True):
        assert torch.equal(ours, theirs)
