"""The kernel for many tokens gives the reference's bits, whatever its shape and configuration."""

import pytest
import torch
from kernel_device import device
from quantized_planes import Planes
from torch import Tensor

from nestq.kernels.prefill_linear import PrefillConfig, arrange_activation, prefill_linear
from nestq.reference.linear import quantize_activation


def run(
    planes: Planes,
    x: Tensor,
    bias: Tensor | None,
    view: str,
    config: PrefillConfig | None = None,
) -> Tensor:
    base, refinement, scale_codes, unit = planes.tiles(device())
    codes, scale = quantize_activation(x)
    out = torch.full((x.shape[0], unit.shape[0]), torch.nan, dtype=x.dtype, device=device())
    prefill_linear(
        arrange_activation(codes, planes.group_size).to(device()),
        scale[:, 0].to(device()),
        base,
        refinement if view == "target" else None,
        scale_codes,
        unit,
        None if bias is None else bias.to(device()),
        planes.group_size,
        planes.overlap,
        out,
        config,
    )
    return out.cpu()


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "group_size", "overlap"),
    [
        (1, 1, 64, 64, 8),
        (65, 17, 576, 64, 8),
        (130, 576, 576, 64, 16),
        (130, 17, 1000, 128, 16),
        (65, 130, 100, 32, 12),
        (130, 33, 1000, 32, 1),
        (65, 16, 1000, 64, 15),
    ],
)
def test_it_gives_the_bits_of_the_reference(
    tokens: int, rows: int, columns: int, group_size: int, overlap: int, view: str
) -> None:
    torch.manual_seed(0)
    planes = Planes.random(rows, columns, group_size, overlap)
    x = torch.randn(tokens, columns).half()
    x[0, :3] = torch.tensor([1000.0, 0, -1000.0])
    x[tokens // 2] = 0
    bias = torch.randn(rows).half()

    assert torch.equal(run(planes, x, bias, view), planes.linear(x, bias, view))
    assert torch.equal(run(planes, x, None, view), planes.linear(x, None, view))


@pytest.mark.parametrize(("base", "refinement"), [(-8, -8), (-8, 7), (7, 7), (7, -8)])
@pytest.mark.parametrize("overlap", [8, 16])
def test_extreme_codes_do_not_wrap(base: int, refinement: int, overlap: int) -> None:
    if overlap * base + refinement < -128:
        refinement = 0
    planes = Planes.random(17, 128, 64, overlap)
    planes.base.fill_((base & 0xF) * 0x11)
    planes.refinement.fill_((refinement + 8) * 0x11)
    x = torch.ones(2, 128)
    x[1] = -1
    for view in ("draft", "target"):
        assert torch.equal(run(planes, x, None, view), planes.linear(x, None, view))


def test_no_configuration_changes_a_bit() -> None:
    torch.manual_seed(1)
    planes = Planes.random(150, 512, 64, 8)
    x = torch.randn(140, 512)
    expected = planes.linear(x, None, "target")
    for config in ((64, 128, 4, 1, 3), (128, 64, 8, 2, 2), (64, 64, 4, 4, 2)):
        assert torch.equal(run(planes, x, None, "target", PrefillConfig(*config)), expected)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(2)
    planes = Planes.random(24, 576, 64, 8)
    x = torch.randn(130, 576)
    together = run(planes, x, None, "target")
    for rows in (slice(0, 1), slice(3, 68), slice(129, 130)):
        assert torch.equal(run(planes, x[rows], None, "target"), together[rows])


def test_programs_cover_the_result_in_any_order() -> None:
    """More parts of tokens than run side by side, and a last set of fewer."""
    torch.manual_seed(3)
    planes = Planes.random(40, 64, 64, 8)
    x = torch.randn(16 * 18 - 3, 64)
    config = PrefillConfig(rows=16, tokens=16, warps=1, blocks=1, stages=2)
    assert torch.equal(run(planes, x, None, "target", config), planes.linear(x, None, "target"))


def test_no_tokens_give_no_rows() -> None:
    planes = Planes.random(16, 64, 64, 8)
    assert run(planes, torch.zeros(0, 64), None, "target").shape == (0, 16)


def test_bad_arguments_are_named() -> None:
    planes = Planes.random(16, 128, 64, 8)
    base, refinement, scale_codes, unit = planes.tiles(device())
    x = torch.zeros(2, 128, dtype=torch.int8, device=device())
    scale = torch.ones(2, device=device())
    out = torch.empty(2, 16, device=device())
    good = {
        "x_codes": x, "x_scale": scale, "base": base, "refinement": refinement,
        "scale_codes": scale_codes, "unit": unit, "bias": None,
        "group_size": 64, "overlap": 8, "out": out,
    }  # fmt: skip
    prefill_linear(**good)
    bad = {
        "x_codes": [x.float(), x[:, :64], x.new_zeros(128, 2).T, x[0]],
        "x_scale": [scale.double(), scale[:1]],
        "base": [base[:, :1], base.int(), base[0]],
        "refinement": [refinement[:, :1]],
        "scale_codes": [scale_codes.int()],
        "bias": [unit[:3]],
        "group_size": [48, 128],
        "overlap": [0, 17],
        "out": [out.int(), out[:1], out.new_empty(16, 2).T],
        "config": [PrefillConfig(128, 128, 8, 3, 2)],
    }
    for name, values in bad.items():
        for value in values:
            expected = "scale_codes|base" if name == "group_size" and value == 128 else name
            with pytest.raises(ValueError, match=expected):
                prefill_linear(**good | {name: value})
