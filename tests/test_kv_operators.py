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
    return query.to(dtype), positions, *keys, *values, 0.25, 5, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("refinement", [False, True])
def test_nested_attention_is_a_sound_operator(
    refinement: bool, strided: bool, dtype: torch.dtype
) -> None:
    arguments = attention_arguments(refinement, strided, dtype)

    torch.library.opcheck(torch.ops.nestq.nested_attention.default, arguments)
    out = torch.ops.nestq.nested_attention(*arguments)
    assert out.is_contiguous()
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
