"""Quantized activations: the reference's codes in tiles, alone and fused with what comes before."""

import pytest
import torch
import torch.nn.functional as F
from kernel_device import device
from torch import Tensor

from nestq.kernels.act_quant import act_quant
from nestq.kernels.prefill_linear import arrange_activation
from nestq.reference.linear import quantize_activation
from nestq.reference.weights import pad_to_groups
from nestq.tile_layout import tile_activation


def check(x: Tensor, result: tuple[Tensor, Tensor, Tensor, Tensor], group_size: int) -> None:
    """Compare with the reference's quantization of x, where tokens are."""
    tokens = x.shape[0]
    x = pad_to_groups(x, group_size)
    sum_width = min(group_size, 64)
    codes, sums, scale = (part.cpu() for part in result[:3])
    expected, expected_scale = quantize_activation(x)
    present = torch.zeros(codes.shape[0] * 8, dtype=torch.bool)
    present[:tokens] = True

    assert torch.equal(scale[:tokens], expected_scale[:, 0])
    tiles = tile_activation(expected)
    by_token = (t.view(*t.shape[:2], 8, 64).transpose(1, 2).flatten(0, 1) for t in (codes, tiles))
    ours, theirs = (t[present] for t in by_token)
    assert torch.equal(ours, theirs)
    padded = pad_to_groups(expected, 64).int()
    expected_sums = padded.view(tokens, -1, sum_width).sum(-1)
    assert torch.equal(sums.transpose(1, 2).flatten(0, 1)[:tokens].long(), expected_sums)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "columns", "group_size"),
    [(1, 64, 64), (5, 576, 64), (9, 100, 32), (17, 1100, 128), (2, 11008, 64)],
)
def test_it_is_the_reference_in_tiles(
    tokens: int, columns: int, group_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, columns).to(dtype)
    x[0] = 0
    x[-1, 0] = 300
    check(x, act_quant(x.to(device()), group_size), group_size)


@pytest.mark.parametrize(("columns", "group_size"), [(64, 64), (1000, 128), (100, 32)])
def test_in_rows_it_is_arranged_for_many_tokens(columns: int, group_size: int) -> None:
    x = torch.randn(9, columns)
    codes, _, scale, _ = act_quant(x.to(device()), group_size, in_rows=True)
    expected, expected_scale = quantize_activation(x)
    assert torch.equal(codes.cpu(), arrange_activation(expected, group_size))
    assert torch.equal(scale.cpu()[:9], expected_scale[:, 0])


def test_halves_round_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5] + [0.0] * 57])
    check(x, act_quant(x.to(device())), 64)


def test_a_row_of_a_wider_tensor_is_read_in_place() -> None:
    wide = torch.randn(3, 200)
    check(wide[:, :96], act_quant(wide.to(device())[:, :96]), 64)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_is_not_lost() -> None:
    x = torch.randn(2, 64)
    x[1, 3] = torch.nan
    scale = act_quant(x.to(device()))[2]
    assert torch.isfinite(scale[0])
    assert torch.isnan(scale[1])


def test_residual_and_norm_come_first() -> None:
    """Codes may differ by one where a sum in another order moves a value across a half."""
    torch.manual_seed(0)
    x, residual = torch.randn(5, 576).half(), torch.randn(5, 576).half()
    weight = (torch.rand(576) + 0.5).half()
    arguments = (x.to(device()), 64, residual.to(device()), weight.to(device()), 1e-5)
    codes, _, scale, total = act_quant(*arguments)

    expected_total = x + residual
    assert torch.equal(total.cpu(), expected_total)
    normed = F.rms_norm(expected_total.float(), (576,), eps=1e-5).half() * weight
    expected, expected_scale = quantize_activation(normed)
    torch.testing.assert_close(scale[:5].cpu(), expected_scale[:, 0], rtol=2**-10, atol=0)
    difference = (codes.cpu().int() - tile_activation(expected).int()).view(1, 9, 8, 64)[:, :, :5]
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.02


def test_the_gate_comes_first() -> None:
    torch.manual_seed(0)
    up, gate = torch.randn(2, 128).half(), torch.randn(2, 128).half() * 4
    codes, _, scale, _ = act_quant(up.to(device()), 64, gate=gate.to(device()))
    expected, expected_scale = quantize_activation(F.silu(gate) * up)
    torch.testing.assert_close(scale[:2].cpu(), expected_scale[:, 0], rtol=2**-10, atol=0)
    difference = (codes.cpu().int() - tile_activation(expected).int()).view(1, 2, 8, 64)[:, :, :2]
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.02
