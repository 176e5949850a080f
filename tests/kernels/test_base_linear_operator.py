"""``base_linear`` on a GPU: the reference's bits with 4-bit activations, its product with 16."""

import pytest
import torch
from kernel_device import device
from quantized_planes import Planes
from torch import Tensor

from nestq.kernels.act_quant import act_quant
from nestq.kernels.linear import base_linear
from nestq.kernels.prefill_linear import arrange_activation
from nestq.reference import linear as reference
from nestq.reference.weights import dequantize


def run(planes: Planes, x: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    base, _, scale, unit = planes.tiles(device())
    bias = None if bias is None else bias.to(device())
    return base_linear(x.to(device()), base, scale, unit, bias, planes.group_size, bits).cpu()


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shape", [(300,), (1, 2, 300), (65, 300), (0, 300)])
def test_4_bits_are_the_bits_of_the_reference(shape: tuple[int, ...], group_size: int) -> None:
    torch.manual_seed(0)
    planes = Planes.random(40, 300, group_size, 8)
    x, bias = torch.randn(shape).half(), torch.randn(40)
    expected = reference.base_linear(x, planes.base, planes.scale, bias, group_size, 4)
    assert torch.equal(run(planes, x, bias, 4), expected)


def test_4_bit_codes_are_those_of_the_reference() -> None:
    torch.manual_seed(1)
    x = torch.randn(9, 100)
    x[0] = 0
    codes, _, scale, _ = act_quant(x.to(device()), 64, in_rows=True, bits=4)
    expected, expected_scale = reference.quantize_activation(x, 4)
    assert torch.equal(codes.cpu(), arrange_activation(expected, 64))
    assert torch.equal(scale.cpu()[:9], expected_scale[:, 0])


@pytest.mark.parametrize("shape", [(100,), (2, 17, 100), (0, 100)])
def test_16_bits_for_any_number_of_tokens(shape: tuple[int, ...]) -> None:
    """The budget is that of ``test_base_linear_16``."""
    torch.manual_seed(2)
    planes = Planes.random(33, 100, 32, 8)
    x, bias = torch.randn(shape).half(), torch.randn(33).half()
    weight = dequantize(planes.base, None, planes.scale, 32, 1, 100, torch.float64)
    expected = x.double() @ weight.T + bias.double()
    magnitude = x.double().abs() @ weight.abs().T + bias.double().abs()
    budget = (100 + 2 * 4 + 2) * 2**-23 * magnitude + 2**-11 * expected.abs() + 2**-25
    out = run(planes, x, bias, 16)
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= budget).all()


@pytest.mark.parametrize("bits", [4, 16])
def test_a_row_has_the_same_bits_alone_and_among_others(bits: int) -> None:
    torch.manual_seed(3)
    planes = Planes.random(20, 100, 64, 8)
    x = torch.randn(35, 100).half()
    together = run(planes, x, None, bits)
    alone = torch.cat([run(planes, row, None, bits) for row in x[:, None]])
    assert torch.equal(alone, together)


def test_float32_is_the_reference() -> None:
    torch.manual_seed(4)
    planes = Planes.random(20, 100, 64, 8)
    x = torch.randn(3, 100)
    expected = reference.base_linear(x, planes.base, planes.scale, None, 64, 16)
    torch.testing.assert_close(run(planes, x, None, 16), expected, rtol=1e-5, atol=1e-4)


def test_bad_arguments_are_refused_by_name() -> None:
    planes = Planes.random(16, 128, 64, 8)
    base, _, scale, unit = planes.tiles(device())
    x = torch.randn(2, 128, device=device()).half()
    with pytest.raises(ValueError, match="base must lie in tiles on a GPU"):
        base_linear(x, base, scale, None, None, 64, 16)
    with pytest.raises(ValueError, match="activation_bits must be 4 or 16, got 8"):
        base_linear(x, base, scale, unit, None, 64, 8)
    with pytest.raises(ValueError, match="x must have as many columns as the weight"):
        base_linear(x[:, :64], base, scale, unit, None, 64, 16)
