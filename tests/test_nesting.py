"""Nesting single linears: codes, reports, and the tensor that a linear holds in the end."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestq import nesting
from nestq.gptq import CalibrationError
from nestq.nesting import NestedCodes, Nester, install
from nestq.recipes import bitnest_w4w8
from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

N, K = 24, 75  # K is no multiple of a group


def linear(seed: int = 0, dtype: torch.dtype = torch.float32, features: int = K) -> nn.Linear:
    layer = nn.Linear(features, N, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(N, features, generator=generator))
        layer.bias.copy_(torch.randn(N, generator=generator))
    return layer


def inputs(features: int = K) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    mixed = torch.randn(400, 12, generator=generator) @ torch.randn(
        12, features, generator=generator
    )
    return mixed + 1.0 * torch.randn(400, features, generator=generator)


def hessian() -> Tensor:
    return inputs().T @ inputs() / 400


def nester(**options: Any) -> Nester:
    return Nester(bitnest_w4w8(**{"group_size": 32, **options}))


def relative_error(outputs: Tensor, layer: nn.Linear) -> float:
    expected = inputs() @ layer.weight.T
    return ((outputs - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("refinement", ["compensated", "closed_form"])
def test_drafts_and_targets(refinement: str) -> None:
    layer = linear()
    work = nester(refinement=refinement)
    (draft,) = work.base(["a"], [layer], hessian())
    base, scale = work.codes["a"].base.clone(), work.codes["a"].scale.clone()
    assert work.reports == []
    (target,) = work.refinement(["a"], [layer], hessian())
    assert torch.equal(work.codes["a"].base, base)
    assert torch.equal(work.codes["a"].scale, scale)
    (report,) = work.reports
    assert report.shape == (N, K)
    # The report's errors are those on the inputs that the Hessian was made from.
    assert report.draft_error == pytest.approx(relative_error(inputs() @ draft.T, layer), rel=1e-3)
    assert report.target_error == pytest.approx(
        relative_error(inputs() @ target.T, layer), rel=1e-3
    )
    assert report.target_error < report.draft_error
    assert report.damping == 0.01
    refined = work.codes["a"].refinement
    assert refined is not None
    overlap = work.recipe.target_overlap
    composed = base.int() * overlap + refined
    expected = composed * scale.float().repeat_interleave(32, 1)[:, :K] / overlap
    torch.testing.assert_close(target, expected)


def test_what_calibration_and_compensation_gain() -> None:
    errors = {}
    for refinement in ("compensated", "closed_form"):
        work = nester(refinement=refinement, overlap=8)
        work.base_and_refinement(["a"], [linear()], hessian())
        errors[refinement] = work.reports[0]
    assert errors["compensated"].draft_error == errors["closed_form"].draft_error
    assert errors["compensated"].target_error < errors["closed_form"].target_error

    work = nester()
    work.round_to_nearest("a", linear())
    draft = NestedCodes(work.codes["a"].base, work.codes["a"].scale).dense(32, 8)
    plain = relative_error(inputs() @ draft.T, linear())
    assert errors["compensated"].draft_error < 0.7 * plain


def test_both_at_once_is_one_after_the_other() -> None:
    layers = [linear(0), linear(1)]
    once, twice = nester(), nester()
    drafts = once.base_and_refinement(["a", "b"], layers, hessian())
    expected = twice.base(["a", "b"], layers, hessian())
    twice.refinement(["a", "b"], layers, hessian())
    for ours, theirs in zip(drafts, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert once.codes.keys() == twice.codes.keys() == {"a", "b"}
    for name, codes in once.codes.items():
        assert torch.equal(codes.base, twice.codes[name].base)
        assert torch.equal(codes.refinement, twice.codes[name].refinement)
    assert once.reports == twice.reports


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_to_nearest(group_size: int, dtype: torch.dtype) -> None:
    layer = linear(dtype=dtype)
    work = nester(group_size=group_size, scale_dtype="float32")
    work.round_to_nearest("a", layer)
    codes = work.codes["a"]
    scale = codes.scale.repeat_interleave(group_size, 1)[:, :K]
    weight = layer.weight.float()
    assert torch.equal(codes.base, (weight / scale).round().clamp(-8, 7).to(torch.int8))
    # In reach of base and refinement the target is off by half a step, s / 16.
    reachable = (weight / scale).abs() < 7
    assert reachable.float().mean() > 0.9
    error = (codes.dense(group_size, 8) - weight).abs()
    assert (error <= scale * (1 / 16 + 1e-5))[reachable].all()
    (report,) = work.reports
    assert report.damping is None
    assert report.dead_columns == 0
    assert report.draft_error == pytest.approx(
        ((codes.base * scale - weight).norm() / weight.norm()).item(), rel=1e-4
    )


def test_codes_leave_the_compute_device(monkeypatch: pytest.MonkeyPatch) -> None:
    work = nester()
    work.base(["known"], [linear()], hessian())
    # The meta device stands for one beside the CPU, which computes here.
    monkeypatch.setattr(nesting, "CODES_DEVICE", torch.device("meta"))
    dense = [
        *work.base(["a"], [linear()], hessian()),
        *work.refinement(["known"], [linear()], hessian()),
        *work.base_and_refinement(["b"], [linear()], hessian()),
    ]
    work.round_to_nearest("c", linear())
    assert not any(weight.is_meta for weight in dense)
    assert work.codes.keys() == {"a", "known", "b", "c"}
    for name, codes in work.codes.items():
        assert codes.base.is_meta
        assert codes.scale.is_meta
        assert codes.refinement is None if name == "a" else codes.refinement.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_install(dtype: torch.dtype) -> None:
    layer = linear(dtype=dtype)
    bias = layer.bias.clone()
    work = nester()
    work.base_and_refinement(["a"], [layer], hessian())
    codes = work.codes["a"]
    draft = NestedCodes(codes.base, codes.scale).dense(32, 8)
    target = codes.dense(32, 8)
    install({"a": layer}, work.codes, work.recipe)
    assert work.codes == {}
    weight = layer.weight
    assert isinstance(weight, NestedQuantTensor)
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert (weight.dtype, weight.shape) == (dtype, (N, K))
    assert torch.equal(layer.bias, bias)
    torch.testing.assert_close(weight.dequantize(), target.to(dtype))
    x = torch.randint(-127, 128, (5, K)).to(dtype)
    x[:, 0] = 127  # a scale of one: INT8 holds these inputs exactly
    tolerance = (
        {"rtol": 2e-2, "atol": 1.0} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-2}
    )
    for view, dense in (("draft", draft), ("target", target)):
        with nest_view(view):  # type: ignore[arg-type]
            output = layer(x)
        expected = (x.double() @ dense.double().T + bias.double()).to(dtype)
        torch.testing.assert_close(output, expected, **tolerance)
    assert (draft - target).abs().max() > 0.01


def test_dead_columns_are_reported() -> None:
    matrix = hessian()
    matrix[:, [3, 40]] = 0
    matrix[[3, 40]] = 0
    work = nester()
    work.base_and_refinement(["a"], [linear()], matrix)
    assert work.reports[0].dead_columns == 2
    assert work.codes["a"].dense(32, 8).isfinite().all()


def test_raised_damping_is_reported() -> None:
    matrix = torch.full((K, K), 1.002)
    matrix.fill_diagonal_(1.0)  # its least eigenvalue is -0.002
    work = nester(damping=0.001)
    work.base_and_refinement(["a"], [linear()], matrix)
    assert work.reports[0].damping == pytest.approx(0.01)


@pytest.mark.parametrize("stage", ["base", "refinement", "base_and_refinement"])
def test_a_hessian_that_cannot_be_inverted_names_the_layer(stage: str) -> None:
    matrix = torch.full((K, K), 3.0)
    matrix.fill_diagonal_(1.0)
    with pytest.raises(CalibrationError, match=r"layers\.0\.up_proj: not positive definite"):
        getattr(nester(), stage)(["layers.0.up_proj"], [linear()], matrix)


@pytest.mark.parametrize("calibrated", [True, False])
def test_scales_that_overflow(calibrated: bool) -> None:
    layer = linear()
    with torch.no_grad():
        layer.weight *= 1e6
    work = nester(scale_dtype="float16")
    message = r"scale_dtype: torch\.float16 cannot hold .* of up_proj"
    if calibrated:
        with pytest.raises(ValueError, match=message):
            work.base(["up_proj"], [layer], hessian())
    else:
        with pytest.raises(ValueError, match=message):
            work.round_to_nearest("up_proj", layer)


def test_a_weight_of_zeros() -> None:
    layer = linear()
    with torch.no_grad():
        layer.weight.zero_()
    work = nester()
    work.base_and_refinement(["a"], [layer], hessian())
    assert (work.codes["a"].dense(32, 8) == 0).all()
    assert (work.reports[0].draft_error, work.reports[0].saturation) == (0, 0)
