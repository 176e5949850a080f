"""What a view changes about the functions that are called inside it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nested_tensors import random
from torch import Tensor
from transformers.activations import ACT2FN

from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALLS = {
    "F.silu": F.silu,
    "F.silu by keyword": lambda x: F.silu(input=x),
    "F.gelu": F.gelu,
    "F.gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "F.softplus": F.softplus,
    "F.mish": F.mish,
    "F.sigmoid": F.sigmoid,
    "torch.sigmoid": torch.sigmoid,
    "torch.sigmoid by keyword": lambda x: torch.sigmoid(input=x),
    "Tensor.sigmoid": lambda x: x.sigmoid(),
    "x * x.sigmoid()": lambda x: x * x.sigmoid(),
}


def assert_rows_keep_their_bits(function: Any, dtype: torch.dtype) -> None:
    """Rows alone, in blocks and all together, whose length no vector divides."""
    x = 3 * torch.randn(40, 1037, generator=torch.Generator().manual_seed(0))
    x = x.to(dtype)
    with torch.no_grad(), nest_view("target"):
        whole = function(x)
        for rows in (1, 3):
            parts = torch.cat([function(part) for part in x.split(rows)])
            assert torch.equal(parts, whole)
    torch.testing.assert_close(whole, function(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_a_row_of_an_activation_has_the_same_bits_in_any_company(
    call: str, dtype: torch.dtype
) -> None:
    assert_rows_keep_their_bits(CALLS[call], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_so_has_every_activation_that_transformers_names(name: str, dtype: torch.dtype) -> None:
    assert_rows_keep_their_bits(ACT2FN[name].to(dtype), dtype)


def test_an_output_that_is_given_is_written() -> None:
    x, out = random(3, 7), torch.empty(3, 7)
    with nest_view("target"):
        torch.sigmoid(x, out=out)

    torch.testing.assert_close(out, torch.sigmoid(x))


def nested(n: int, k: int) -> NestedQuantTensor:
    return NestedQuantTensor.from_hp(random(n, k), 32)


@pytest.mark.parametrize("make", [random, nested])
@pytest.mark.parametrize("view", ["draft", "target"])
def test_a_linear_takes_its_arguments_by_the_names_that_pytorch_gives_them(
    make: Any, view: Any
) -> None:
    x, weight, bias = random(3, 40), make(5, 40), random(5)
    with nest_view(view):
        expected = F.linear(x, weight, bias)

        assert torch.equal(F.linear(input=x, weight=weight, bias=bias), expected)
        assert torch.equal(F.linear(x, weight=weight, bias=bias), expected)


def test_the_innermost_view_counts() -> None:
    def read(x: Tensor) -> Tensor:
        return F.linear(x, weight)

    x, weight = random(3, 40), nested(5, 40)
    with nest_view("draft"):
        draft = read(x)
        with nest_view("target"):
            target = read(x)
        assert torch.equal(read(x), draft)

    assert not torch.equal(draft, target)
    assert torch.equal(read(x), target)


def test_another_view_is_refused() -> None:
    with pytest.raises(ValueError, match=r"view must be one of .* got 'base'"):
        nest_view("base")  # type: ignore[arg-type]
