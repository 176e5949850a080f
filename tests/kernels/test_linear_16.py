"""The dense linear kernel: within its rounding of the exact product, each row as if alone."""

import pytest
import torch
from kernel_device import device
from torch import Tensor

from nestq.kernels.linear_16 import Linear16Config, linear_16
from nestq.reference import linear as reference


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with exact products.

    Rounding the result costs half a unit of its 11 bits. In float32 a sum of K products and a bias
    is off by at most K units of the sum of their magnitudes, a unit being 2^-23 where a tensor core
    cuts instead of rounding.
    """
    expected = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected = expected + bias.double()
        magnitude = magnitude + bias.double().abs()
    budget = x.shape[1] * 2**-23 * magnitude + 2**-11 * expected.abs() + 2**-25
    assert ((out.cpu().double() - expected).abs() <= budget).all()


def move(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(device()) for t in tensors]


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 1, 64), (1, 17, 576), (5, 576, 576), (8, 40, 1000), (9, 33, 301), (16, 17, 1000)],
)
def test_it_is_the_product_within_rounding(tokens: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, columns).half(), torch.randn(rows, columns).half()
    x[-1] = 0
    weight[0] = 0
    bias = torch.randn(rows).half()
    for b in (None, bias):
        check(linear_16(*move(x, weight, b)), x, weight, b)


def test_it_differs_from_the_reference_by_rounding_only() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(3, 256).half(), torch.randn(20, 256).half(), torch.randn(20)
    out = linear_16(*move(x, weight, bias.half())).cpu()
    expected = reference.linear_16(x, weight, bias.half())
    magnitude = x.float().abs() @ weight.float().abs().T
    tolerance = 2 * (256 * 2**-23 * magnitude) + 2 * 2**-11 * expected.float().abs() + 2**-10
    assert ((out.float() - expected.float()).abs() <= tolerance).all()


@pytest.mark.parametrize("config", [Linear16Config(1, 1, 2), Linear16Config(8, 3, 3)])
def test_any_configuration_computes_the_same(config: Linear16Config) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(11, 328).half(), torch.randn(70, 328).half()
    check(linear_16(*move(x, weight, None), config), x, weight, None)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(3)
    x, weight, bias = move(
        torch.randn(16, 1000).half(), torch.randn(33, 1000).half(), torch.randn(33).half()
    )
    together = linear_16(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 8), slice(7, 16), slice(15, 16)):
        assert torch.equal(linear_16(x[rows], weight, bias), together[rows])


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = torch.ones(3, 64).half(), torch.ones(16, 64).half()
    x[1, 5] = torch.nan
    out = linear_16(*move(x, weight, None)).cpu()
    assert torch.isnan(out[1]).all()
    assert (out[[0, 2]] == 64).all()


def test_no_tokens_give_no_rows() -> None:
    assert linear_16(*move(torch.zeros(0, 64).half(), torch.zeros(5, 64).half(), None)).shape == (
        0,
        5,
    )


def test_bad_arguments_are_named() -> None:
    x, weight, bias = move(
        torch.zeros(2, 64).half(), torch.zeros(16, 64).half(), torch.zeros(16).half()
    )
    good = {"x": x, "weight": weight, "bias": bias}
    bad = {
        "x": [x.float(), x[0], x.new_zeros(17, 64), x.new_zeros(64, 2).T],
        "weight": [weight.bfloat16(), weight[:, :32], weight[0], weight.new_zeros(64, 16).T],
        "bias": [bias.float(), bias[:3]],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} "):
                linear_16(**good | {name: value})
