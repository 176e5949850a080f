"""The linear operator's kernels together: the reference's bits for any number of tokens."""

import pytest
import torch
from kernel_device import device
from quantized_planes import Planes

from nestq.kernels.linear import dense_linear, linear
from nestq.reference.linear import linear_16


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("shape", [(300,), (1, 1, 300), (2, 3, 300), (65, 300), (0, 300)])
def test_it_gives_the_bits_of_the_reference(shape: tuple[int, ...], view: str) -> None:
    torch.manual_seed(0)
    planes = Planes.random(40, 300, 64, 8)
    base, refinement, scale, unit = planes.tiles(device())
    x, bias = torch.randn(shape), torch.randn(40)
    used = refinement if view == "target" else None
    out = linear(x.to(device()), base, used, scale, unit, bias.to(device()), 64, 8)
    assert torch.equal(out.cpu(), planes.linear(x, bias, view))


def test_columns_with_gaps_are_copied() -> None:
    planes = Planes.random(16, 64, 64, 8)
    base, _, scale, unit = planes.tiles(device())
    x = torch.randn(64, 3).T
    out = linear(x.to(device()), base, None, scale, unit, None, 64, 8)
    assert torch.equal(out.cpu(), planes.linear(x, None, "draft"))


def test_bad_arguments_are_refused_by_name() -> None:
    planes = Planes.random(16, 128, 64, 8)
    base, refinement, scale, unit = planes.tiles(device())
    x = torch.randn(2, 128, device=device())
    with pytest.raises(ValueError, match="base must lie in tiles on a GPU"):
        linear(x, base, refinement, scale, None, None, 64, 8)
    with pytest.raises(ValueError, match=r"x must be float16, .*got torch.float64"):
        linear(x.double(), base, refinement, scale, unit, None, 64, 8)
    with pytest.raises(ValueError, match="x must have as many columns as the weight"):
        linear(x[:, :64], base, refinement, scale, unit, None, 64, 8)
    with pytest.raises(ValueError, match=r"refinement must have shape \(1, 2, 512\)"):
        linear(x, base, refinement[:, :1], scale, unit, None, 64, 8)
    with pytest.raises(ValueError, match=r"group_size must be one of .*, got 48"):
        linear(x, base, refinement, scale, unit, None, 48, 8)
    with pytest.raises(ValueError, match="overlap must be from 1 to 16, got 99"):
        linear(x, base, refinement, scale, unit, None, 64, 99)
    with pytest.raises(ValueError, match=r"x must be float16, .*got torch.float64"):
        dense_linear(x.double(), x.double(), None)


@pytest.mark.parametrize("view", ["draft", "target"])
def test_the_smallest_activations_have_the_bits_of_the_reference(view: str) -> None:
    torch.manual_seed(2)
    planes = Planes.random(16, 64, 64, 8)
    base, refinement, scale, unit = planes.tiles(device())
    x = torch.randn(6, 64) * torch.logspace(-38, -30, 6)[:, None]
    used = refinement if view == "target" else None
    out = linear(x.to(device()), base, used, scale, unit, None, 64, 8)
    assert torch.equal(out.cpu(), planes.linear(x, None, view))


def test_a_dense_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(35, 100).half(), torch.randn(20, 100).half(), torch.randn(20)
    bias = bias.half()
    arguments = weight.to(device()), bias.to(device())
    together = dense_linear(x.to(device()), *arguments)
    alone = torch.cat([dense_linear(row.to(device()), *arguments) for row in x[:, None]])
    assert torch.equal(together, alone)
    # Half of the last bit of each of both 16-bit results, and float32 sums of 100 terms.
    tolerance = 2**-10 + 100 * 2**-24
    expected = linear_16(x, weight, bias).float()
    size = x.float().abs() @ weight.float().abs().T + bias.float().abs()
    assert ((together.cpu().float() - expected).abs() <= tolerance * size).all()
