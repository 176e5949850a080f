"""The linear kernel gives the reference's bits, whatever its shape and configuration."""

import pytest
import torch
from kernel_device import device
from quantized_planes import Planes
from torch import Tensor

from nestq.kernels.act_quant import act_quant
from nestq.kernels.dual_plane_linear import LinearConfig, dual_plane_linear


def run(
    planes: Planes,
    x: Tensor,
    bias: Tensor | None,
    view: str,
    config: tuple[int, int, int] = (4, 2, 2),
) -> Tensor:
    base, refinement, scale_codes, unit = planes.tiles(device())
    codes, sums, scale, _ = act_quant(x.to(device()), planes.group_size)
    out = torch.full((x.shape[0], unit.shape[0]), torch.nan, dtype=x.dtype, device=device())
    dual_plane_linear(
        codes,
        sums,
        scale,
        base,
        refinement if view == "target" else None,
        scale_codes,
        unit,
        None if bias is None else bias.to(device()),
        planes.group_size,
        planes.overlap,
        out,
        LinearConfig(*config),
    )
    return out.cpu()


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "group_size", "overlap", "config"),
    [
        (1, 1, 64, 64, 8, (1, 1, 1)),
        (5, 48, 256, 64, 8, (4, 1, 1)),
        (1, 17, 576, 64, 8, (4, 2, 2)),
        (2, 576, 576, 64, 8, (8, 1, 1)),
        (13, 33, 300, 128, 16, (2, 2, 2)),
        (3, 16, 100, 32, 12, (2, 1, 2)),
        (8, 40, 1000, 32, 1, (4, 1, 1)),
        (64, 20, 640, 64, 8, (2, 1, 2)),
        (5, 16, 11008, 64, 8, (8, 1, 2)),
    ],
)
def test_it_gives_the_bits_of_the_reference(
    tokens: int,
    rows: int,
    columns: int,
    group_size: int,
    overlap: int,
    config: tuple[int, int, int],
    view: str,
) -> None:
    torch.manual_seed(0)
    planes = Planes.random(rows, columns, group_size, overlap)
    x = torch.randn(tokens, columns).half()
    x[0, :3] = torch.tensor([1000.0, 0, -1000.0])
    bias = torch.randn(rows).half()

    out = run(planes, x, bias, view, config)
    assert torch.equal(out, planes.linear(x, bias, view))
    assert torch.equal(run(planes, x, None, view, config), planes.linear(x, None, view))


def test_no_configuration_changes_a_bit() -> None:
    torch.manual_seed(1)
    planes = Planes.random(40, 832, 64, 8)
    x = torch.randn(3, 832)
    outputs = [
        run(planes, x, None, "target", config)
        for config in ((1, 1, 1), (2, 2, 1), (4, 1, 4), (8, 2, 2), (2, 4, 3))
    ]
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(2)
    planes = Planes.random(24, 576, 64, 8)
    x = torch.randn(17, 576)
    together = run(planes, x, None, "target")
    for rows in (slice(0, 1), slice(3, 8), slice(8, 17)):
        assert torch.equal(run(planes, x[rows], None, "target"), together[rows])


def test_a_token_of_zeros_gives_the_bias() -> None:
    planes = Planes.random(16, 64, 64, 8)
    bias = torch.randn(16)
    out = run(planes, torch.zeros(2, 64), bias, "target")
    assert torch.equal(out, bias.expand(2, -1))


def test_the_draft_never_reads_the_refinement() -> None:
    planes = Planes.random(16, 128, 64, 8)
    x = torch.randn(2, 128)
    before = run(planes, x, None, "draft")
    target = run(planes, x, None, "target")
    planes.refinement.fill_(0x5A)
    assert torch.equal(run(planes, x, None, "draft"), before)
    assert not torch.equal(run(planes, x, None, "target"), target)
