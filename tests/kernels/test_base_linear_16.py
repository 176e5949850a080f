"""The W4A16 kernel: within its rounding of the exact product, each row as if alone."""

import pytest
import torch
from kernel_device import device
from quantized_planes import Planes
from torch import Tensor

from nestq.kernels.base_linear_16 import BaseLinear16Config, base_linear_16
from nestq.reference.weights import dequantize


def run(
    planes: Planes, x: Tensor, bias: Tensor | None, config: BaseLinear16Config | None = None
) -> Tensor:
    base, _, scale_codes, unit = planes.tiles(device())
    bias = None if bias is None else bias.to(device())
    group_size = planes.group_size
    return base_linear_16(x.to(device()), base, scale_codes, unit, bias, group_size, config).cpu()


def check(out: Tensor, planes: Planes, x: Tensor, bias: Tensor | None) -> None:
    """Compare with exact products of the dequantized weight, whose scales are exact.

    Rounding the result costs half a unit of its 11 bits. In float32 a sum of K products, scaled
    group by group, times the row's unit and with a bias, is off by at most K + 2 G + 2 units of the
    sum of their magnitudes, a unit being 2^-23 where a tensor core cuts instead of rounding.
    """
    weight = dequantize(
        planes.base, None, planes.scale, planes.group_size, 1, x.shape[1], torch.float64
    )
    expected = x.double() @ weight.T
    magnitude = x.double().abs() @ weight.abs().T
    if bias is not None:
        expected = expected + bias.double()
        magnitude = magnitude + bias.double().abs()
    units = x.shape[1] + 2 * planes.scale.shape[1] + 2
    budget = units * 2**-23 * magnitude + 2**-11 * expected.abs() + 2**-25
    assert ((out.double() - expected).abs() <= budget).all()


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "group_size"),
    [
        (1, 1, 64, 64),
        (1, 17, 576, 64),
        (5, 576, 576, 64),
        (9, 33, 1000, 128),
        (16, 17, 1000, 32),
        (3, 16, 100, 32),
        (8, 40, 301, 64),
    ],
)
def test_it_is_the_product_within_rounding(
    tokens: int, rows: int, columns: int, group_size: int
) -> None:
    torch.manual_seed(0)
    planes = Planes.random(rows, columns, group_size, 8)
    x = torch.randn(tokens, columns).half()
    x[-1] = 0
    bias = torch.randn(rows).half()
    for b in (None, bias):
        check(run(planes, x, b), planes, x, b)


def test_every_code_is_exact() -> None:
    """One column at a time: the result is the dequantized weight."""
    planes = Planes.random(16, 128, 32, 8)
    planes.scale.fill_(1)
    planes.base.copy_(torch.arange(16 * 64).view(16, 64).to(torch.uint8))
    weight = dequantize(planes.base, None, planes.scale, 32, 1, 128, torch.float32)
    for start in range(0, 128, 16):
        x = torch.eye(128)[start : start + 16].half()
        assert torch.equal(run(planes, x, None).float(), weight[:, start : start + 16].T)


@pytest.mark.parametrize("config", [BaseLinear16Config(1, 1, 2), BaseLinear16Config(8, 3, 3)])
def test_any_configuration_computes_the_same(config: BaseLinear16Config) -> None:
    torch.manual_seed(2)
    planes = Planes.random(70, 640, 64, 8)
    x = torch.randn(11, 640).half()
    check(run(planes, x, None, config), planes, x, None)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(3)
    planes = Planes.random(33, 1000, 64, 8)
    x = torch.randn(16, 1000).half()
    together = run(planes, x, None)
    for rows in (slice(0, 1), slice(3, 8), slice(7, 16), slice(15, 16)):
        assert torch.equal(run(planes, x[rows], None), together[rows])


def test_bad_arguments_are_named() -> None:
    planes = Planes.random(16, 128, 64, 8)
    base, _, scale_codes, unit = planes.tiles(device())
    x = torch.zeros(2, 128, device=device()).half()
    good = {
        "x": x, "base": base, "scale_codes": scale_codes, "unit": unit, "bias": None,
        "group_size": 64,
    }  # fmt: skip
    bad = {
        "x": [x.float(), x[0], x[:, :64].contiguous(), x.new_zeros(17, 128), x.new_zeros(128, 2).T],
        "base": [base[:, :1], base.int(), base[0]],
        "scale_codes": [scale_codes.int()],
        "unit": [unit.double()],
        "bias": [unit[:3], unit.int()],
        "group_size": [48],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                base_linear_16(**good | {name: value})
