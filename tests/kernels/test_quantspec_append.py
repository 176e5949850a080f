"""The kernel that writes QuantSpec's cache writes the bytes of the reference."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kernel_device import device
from torch import Tensor

from nestq.kernels.attention_quantspec import quantspec_attention
from nestq.kernels.quantspec_append import quantspec_append
from nestq.reference import attention_quantspec, quantspec
from nestq.reference.kv_quantspec import GROUP, value_groups
from nestq.reference.quantspec import SLOTS


def cache_of(
    batch: int, heads: int, groups: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Buffers of random tokens, and planes full of bytes that a write would change."""
    tensors = []
    codes = batch, heads, groups * GROUP, head_dim // 2
    for scales in ((groups, head_dim), (groups * GROUP, value_groups(head_dim))):
        sizes = torch.randn(1, heads, 1, head_dim).exp()
        recent = torch.randn(batch, heads, SLOTS, head_dim) * sizes + torch.randn(
            heads, 1, head_dim
        )
        tensors.append(recent.to(dtype))
        tensors += [torch.randint(0, 256, codes, dtype=torch.uint8) for _ in "ur"]
        tensors += [torch.full((batch, heads, *scales), -1.0) for _ in "sz"]
    return tensors


def check(keys: Tensor, values: Tensor, positions: Tensor, cache: list[Tensor]) -> list[Tensor]:
    """Both write the same; returns what was written."""
    ours = [tensor.to(device(), copy=True) for tensor in cache]
    quantspec.quantspec_append(keys, values, positions, *cache)
    quantspec_append(*(x.to(device()) for x in (keys, values, positions)), *ours)
    for one, other in zip(ours, cache, strict=True):
        # Which bits a NaN has is left to the device.
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
    return cache


def consecutive(last: list[int], count: int) -> Tensor:
    return torch.tensor(last)[:, None] - torch.arange(count - 1, -1, -1)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (6, torch.float32),
        (64, torch.float16),
        (80, torch.float32),
        (128, torch.float16),
        (256, torch.float16),
    ],
)
def test_it_writes_the_bytes_of_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    """Rows at and behind the first token of a group, long before it, and with pads."""
    torch.manual_seed(head_dim)
    keys, values = (torch.randn(4, 2, 3, head_dim).to(dtype) for _ in "kv")
    positions = consecutive([3 * GROUP, 2 * GROUP + 2, 3 * GROUP - 1, 1], 3)
    cache = cache_of(4, 2, 2, head_dim, dtype)
    written = check(keys, values, positions, cache)[3][:, 0, :, 0] != -1
    assert written.tolist() == [[False, True], [True, False], [False, False], [False, False]]


@pytest.mark.parametrize("count", [GROUP + 1, 2 * GROUP])
def test_a_long_piece_has_several_groups(count: int) -> None:
    torch.manual_seed(count)
    keys, values = (torch.randn(3, 1, count, 16).half() for _ in "kv")
    positions = consecutive([4 * GROUP, 4 * GROUP - 1, count - 40], count)
    cache = cache_of(3, 1, 3, 16, torch.float16)
    written = check(keys, values, positions, cache)[3][:, 0, :, 0] != -1
    assert written.sum(1).tolist() == [2, 1 if count == GROUP + 1 else 2, 0]


def test_states_are_read_in_place() -> None:
    merged = torch.randn(1, 3, 9, 64).half().transpose(1, 2)
    _, keys, values = merged.split([5, 2, 2], dim=1)
    assert not keys.is_contiguous()
    check(keys, values, consecutive([2 * GROUP + 1], 3), cache_of(1, 2, 1, 64, torch.float16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_equal_numbers_and_nan() -> None:
    cache = cache_of(1, 1, 1, 16, torch.float32)
    for recent in (cache[0], cache[5]):
        recent[:, :, :GROUP, 3] = 0.1
        recent[:, :, 5] = 0.2
        recent[:, :, 7, 4] = torch.nan
        recent[:, :, 9] = 0
    keys, values = torch.randn(2, 1, 1, 1, 16)
    check(keys, values, torch.tensor([[2 * GROUP]]), cache)
    assert cache[3].isnan().sum() == 1
    assert cache[8].isnan().sum() == 1


def test_a_pass_through_both_kernels() -> None:
    """Written as the reference writes it, and attended from near to it."""
    torch.manual_seed(0)
    count, scaling = 5, 0.25
    query, keys, values = (torch.randn(1, h, count, 16).half() for h in (2, 1, 1))
    positions = consecutive([3 * GROUP + 2], count)
    cache = cache_of(1, 1, 2, 16, torch.float16)
    for at in torch.arange(int(positions[0, 0]))[None].split(GROUP, 1):
        earlier = (torch.randn(1, 1, at.shape[1], 16).half() for _ in "kv")
        quantspec.quantspec_append(*earlier, at, *cache)
    ours = [tensor.to(device(), copy=True) for tensor in cache]
    reference = partial(
        quantspec.append_and_attend,
        quantspec.quantspec_append,
        attention_quantspec.quantspec_attention,
    )
    kernels = partial(quantspec.append_and_attend, quantspec_append, quantspec_attention)
    states = query, keys, values, positions
    expected = reference(*states, *cache, True, scaling, 0)
    out = kernels(*(x.to(device()) for x in states), *ours, True, scaling, 0)
    assert out.shape == query.shape
    assert out.transpose(1, 2).is_contiguous()
    # The kernel's own tests have a budget; these are numbers near 1 in float16.
    assert (out.cpu() - expected).abs().max() < 2**-7
    for one, other in zip(ours, cache, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[..., :14], "keys must be"),
        (0, lambda x: x.double(), "keys must be float16"),
        (1, lambda x: x.mT.contiguous().mT, "values must be contiguous along D"),
        (2, lambda x: x.int(), "positions must be int64"),
        (3, lambda x: x[:, :, :258], "R at least 259"),
        (4, lambda x: x.mT.contiguous().mT, "key_base must be contiguous"),
        (8, lambda x: x.to("meta"), "recent_values must be on the device"),
        (11, lambda x: x[..., :0], "value scale must be"),
    ],
)
def test_what_does_not_fit_is_refused(
    index: int, change: Callable[[Tensor], Any], message: str
) -> None:
    states = torch.zeros(1, 2, 3, 16)
    cache = cache_of(1, 2, 1, 16, torch.float32)
    arguments = [states, states, torch.tensor([[1, 2, 3]]), *cache]
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match=message):
        quantspec_append(*arguments)


COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nestq.kernels.quantspec_append import quantspec_append_kernel as kernel

states = dict.fromkeys(("keys", "values", "recent_keys", "recent_values"), "bf16")
names = ("base", "refinement", "scale", "zero")
kinds = dict(zip(names, ("u8", "u8", "fp32", "fp32"), strict=True))
planes = {f"{of}_{name}": kinds[name] for of in ("key", "value") for name in names}
pointers = states | planes | {"positions": "i64"}
for half, groups in ((40, 1), (128, 2)):
    constants = {"HALF": half, "PADDED": 64 if half == 40 else 128, "VALUE_GROUPS": groups}
    constants |= {"TOKENS": 8, "KEY_COLUMNS": 16, "VALUE_TOKENS": 16}
    types = {name: "*" + dtype for name, dtype in pointers.items()}
    scalars = dict.fromkeys(kernel.arg_names, "i32")
    signature = scalars | types | dict.fromkeys(constants, "constexpr")
    options = {"num_warps": 4, "enable_fp_fusion": False}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants), target, options)
    assert "div.full" not in compiled.asm["ptx"]
    # No local memory: nothing is spilled.
    assert ".local" not in compiled.asm["ptx"]
"""


@pytest.mark.parametrize("capability", [90])
def test_it_compiles(capability: int) -> None:
    command = [sys.executable, "-c", COMPILE, str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
