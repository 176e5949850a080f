"""GPTQ: what it must equal, what it must beat, and what it does with Hessians that are off."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestq import gptq
from nestq.gptq import (
    CalibrationError,
    Hessian,
    factorize,
    quantize_base,
    quantize_refinement,
    search_scale,
)
from nestq.reference import weights as reference

GROUP = 32


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(features: int, rows: int = 512) -> Tensor:
    """Hessian of inputs that share a few directions."""
    mixing = random(8, features, seed=1)
    inputs = random(rows, 8, seed=2) @ mixing + 0.3 * random(rows, features, seed=3)
    return inputs.T @ inputs / rows


def scale_of(weight: Tensor) -> Tensor:
    padded = reference.pad_to_groups(weight, GROUP)
    return reference.absmax_scale(padded, GROUP, 4, torch.bfloat16)


def dense(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * reference.expand_scale(scale.float(), GROUP)[:, : codes.shape[1]]


def target(base: Tensor, refinement: Tensor, scale: Tensor, overlap: int) -> Tensor:
    return dense(base.int() * overlap + refinement, scale) / overlap


def nearest(weight: Tensor, scale: Tensor) -> Tensor:
    padded = reference.pad_to_groups(weight, GROUP)
    return reference.round_to_base(padded, scale, GROUP)[:, : weight.shape[1]]


def output_error(approximation: Tensor, weight: Tensor, hessian: Tensor) -> float:
    difference = (approximation - weight).double()
    return ((difference @ hessian.double()) * difference).sum().item()


def closed_form(weight: Tensor, base: Tensor, scale: Tensor, overlap: int) -> tuple[Tensor, Tensor]:
    columns = weight.shape[1]
    codes, clipped = reference.refine(
        reference.pad_to_groups(weight, GROUP),
        reference.pad_to_groups(base, GROUP),
        scale,
        GROUP,
        overlap,
    )
    return codes[:, :columns], clipped[:, :columns]


# The sweep.


@pytest.mark.parametrize("features", [64, 75, 160])
def test_base_beats_round_to_nearest_on_correlated_inputs(features: int) -> None:
    weight, hessian = random(24, features), correlated(features)
    scale = scale_of(weight)
    codes = quantize_base(weight, factorize(hessian, 0.01), scale, GROUP)
    assert codes.dtype == torch.int8
    assert codes.shape == weight.shape
    assert codes.min() >= -8
    assert codes.max() <= 7
    ours = output_error(dense(codes, scale), weight, hessian)
    plain = output_error(dense(nearest(weight, scale), scale), weight, hessian)
    assert ours < 0.5 * plain


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 9),
    features=st.integers(1, 140),
    factor=st.sampled_from([0.25, 1.0, 64.0]),
    seed=st.integers(0, 1000),
)
def test_without_correlation_it_is_round_to_nearest(
    rows: int, features: int, factor: float, seed: int
) -> None:
    weight = random(rows, features, seed=seed)
    scale = scale_of(weight)
    base_factor = factorize(factor * torch.eye(features), 0.01)
    base = quantize_base(weight, base_factor, scale, GROUP)
    assert torch.equal(base, nearest(weight, scale))
    for overlap in (8, 16):  # powers of two: dividing and multiplying by them is exact
        codes, saturation = quantize_refinement(weight, base, base_factor, scale, GROUP, overlap)
        # The two compute the remainder in another order: an ulp of w / s, times the overlap.
        reached = target(base, codes, scale, overlap)
        expected_codes, clipped = closed_form(weight, base, scale, overlap)
        expected = target(base, expected_codes, scale, overlap)
        step = dense(torch.ones_like(base), scale) / overlap
        tie = ((reached - weight).abs() - (expected - weight).abs()).abs() <= 1e-4 * step
        assert ((codes == expected_codes) | tie).all()
        assert (
            abs(saturation - clipped.float().mean().item())
            <= (codes != expected_codes).float().mean() + 1e-6
        )


@pytest.mark.parametrize("block", [1, 7, 75, 1000])
def test_the_block_size_changes_nothing_but_rounding(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, hessian = random(16, 150), correlated(150)
    factor, scale = factorize(hessian, 0.01), scale_of(weight)
    expected = quantize_base(weight, factor, scale, GROUP)
    expected_error = output_error(dense(expected, scale), weight, hessian)
    monkeypatch.setattr(gptq, "BLOCK", block)
    codes = quantize_base(weight, factor, scale, GROUP)
    # Sums of 150 float32 products in another order differ by at most 150 * 2**-24 = 1e-5 of a
    # step or so. A code flips where a value lies so near to a tie (2400 codes, 2e-5 wide: 0.05
    # expected), and each flip may change the rest of its row.
    changed_rows = (codes != expected).any(1).sum()
    assert changed_rows <= 1
    assert output_error(dense(codes, scale), weight, hessian) < 1.2 * expected_error


def test_a_column_is_compensated_by_later_ones_only() -> None:
    """Two equal inputs: the second takes up what the first could not represent."""
    weight = torch.tensor([[0.4, 0.4]])
    scale = torch.ones(1, 1)
    factor = factorize(torch.ones(2, 2), 1e-4)
    # 0.4 rounds to 0; the second becomes 0.8 and rounds to 1: together 1, nearest to 0.8.
    assert quantize_base(weight, factor, scale, GROUP).tolist() == [[0, 1]]


def test_zero_groups() -> None:
    weight = random(4, 64)
    weight[:, :32] = 0
    scale = scale_of(weight)
    codes = quantize_base(weight, factorize(torch.eye(64), 0.01), scale, GROUP)
    assert (codes[:, :32] == 0).all()
    assert (codes[:, 32:] != 0).any()


# Refinement.


@pytest.mark.parametrize("overlap", [4, 8, 12, 16])
@pytest.mark.parametrize("features", [64, 75])
def test_compensated_beats_closed_form_and_leaves_the_base(overlap: int, features: int) -> None:
    weight, hessian = random(24, features), correlated(features)
    factor, scale = factorize(hessian, 0.01), scale_of(weight)
    base = quantize_base(weight, factor, scale, GROUP)
    before = base.numpy().tobytes(), scale.view(torch.int16).numpy().tobytes(), weight.clone()
    codes, saturation = quantize_refinement(weight, base, factor, scale, GROUP, overlap)
    assert (base.numpy().tobytes(), scale.view(torch.int16).numpy().tobytes()) == before[:2]
    assert torch.equal(weight, before[2])
    composed = base.int() * overlap + codes
    assert codes.min() >= -8
    assert codes.max() <= 7
    assert composed.min() >= -128
    assert composed.max() <= 127
    plain, clipped = closed_form(weight, base, scale, overlap)
    ours = output_error(target(base, codes, scale, overlap), weight, hessian)
    assert ours < output_error(target(base, plain, scale, overlap), weight, hessian)
    # So strongly correlated inputs let GPTQ move weights out of the reach of a large overlap.
    assert 0 <= saturation <= 1
    assert (clipped.float().mean() > 0.005) == (overlap > 4)
    if overlap == 4:
        assert ours < 0.1 * output_error(dense(base, scale), weight, hessian)


@pytest.mark.parametrize("overlap", [8, 16])
def test_saturation_is_counted_exactly(overlap: int) -> None:
    scale = torch.full((1, 1), 0.5)
    base = torch.tensor([[0, 0, 0, 0, -8, -8, 7, 3, 0, 0]], dtype=torch.int8)
    steps = torch.tensor([[7, 8, -8, -9, -1, 0, 20, 0, 7.25, -8.25]])  # of the target, from base
    weight = (base + steps / overlap) * 0.5
    factor = factorize(torch.eye(10), 0.01)
    codes, saturation = quantize_refinement(weight, base, factor, scale, GROUP, overlap)
    # With overlap 16 a base of -8 allows no negative refinement, else int8 overflows.
    lowest = 0 if overlap == 16 else -1
    assert codes.tolist() == [[7, 7, -8, -8, lowest, 0, 7, 0, 7, -8]]
    assert saturation == (4 if overlap == 16 else 3) / 10


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), features=st.integers(1, 70))
def test_closed_form_is_the_papers(seed: int, features: int) -> None:
    """Equations 7 to 10 with rho 16, in float64, written out."""
    weight = random(3, features, seed=seed).double()
    base = torch.randint(
        -8, 8, weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8
    )
    scale = scale_of(weight.float())
    codes, clipped = closed_form(weight, base, scale, 16)
    for row in range(3):
        for column in range(features):
            s = scale[row, column // GROUP].double().item()
            q = base[row, column].item()
            residual = weight[row, column].item() - q * s
            ideal = round(residual / s * 16)
            low = 0 if q == -8 else -8
            expected = max(low, min(7, ideal))
            if abs(abs(residual / s * 16 - ideal) - 0.5) > 1e-9:
                assert codes[row, column] == expected
                assert clipped[row, column] == (expected != ideal)
            assert -128 <= 16 * q + expected <= 127
    composed = reference.compose(base, codes, 16)
    assert torch.equal(composed.int(), base.int() * 16 + codes.int())


# Hessians that are off.


def test_hessian_is_the_mean_over_all_rows() -> None:
    hessian = Hessian(5, torch.device("cpu"))
    first, second = random(2, 3, 5), random(4, 5, seed=1)
    hessian.add(first)
    hessian.add(second.bfloat16())
    rows = torch.cat([first.flatten(0, 1), second.bfloat16().float()]).double()
    torch.testing.assert_close(hessian.mean("x").double(), rows.T @ rows / 10)


def test_hessian_without_rows() -> None:
    with pytest.raises(CalibrationError, match=r"layers.1.q_proj: no calibration row"):
        Hessian(4, torch.device("cpu")).mean("layers.1.q_proj")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_hessian_of_inputs_that_are_not_finite(value: float) -> None:
    hessian = Hessian(4, torch.device("cpu"))
    inputs = random(3, 4)
    inputs[1, 2] = value
    hessian.add(inputs)
    with pytest.raises(CalibrationError, match=r"layers.1.q_proj: .*NaN or infinity"):
        hessian.mean("layers.1.q_proj")


def test_factor_inverts_the_damped_hessian() -> None:
    hessian = correlated(40)
    factor = factorize(hessian, 0.05)
    damped = hessian.double() + 0.05 * hessian.diagonal().double().mean() * torch.eye(40)
    upper = factor.upper.double()
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(40).double(), atol=1e-4, rtol=0)
    assert factor.damping == 0.05
    assert factor.dead_columns == 0
    assert torch.equal(factor.diagonal, hessian.diagonal())


def test_dead_columns_are_counted_and_harmless() -> None:
    weight, hessian = random(16, 64), correlated(64)
    alive = torch.ones(64, dtype=torch.bool)
    alive[[0, 17, 63]] = False
    hessian[~alive] = 0
    hessian[:, ~alive] = 0
    scale = scale_of(weight)
    factor = factorize(hessian, 0.01)
    assert factor.dead_columns == 3
    codes = quantize_base(weight, factor, scale, GROUP)
    # Nothing reaches a dead column, and it disturbs no other.
    assert torch.equal(codes[:, ~alive], nearest(weight, scale)[:, ~alive])
    other = weight.clone()
    other[:, ~alive] = 0.1
    others_codes = quantize_base(other, factor, scale, GROUP)
    assert torch.equal(codes[:, alive], others_codes[:, alive])


def test_all_columns_dead() -> None:
    weight = random(4, 32)
    scale = scale_of(weight)
    factor = factorize(torch.zeros(32, 32), 0.01)
    assert factor.dead_columns == 32
    assert torch.equal(quantize_base(weight, factor, scale, GROUP), nearest(weight, scale))


def test_singular_hessian_is_damped() -> None:
    row = random(1, 32)
    factor = factorize(row.T @ row, 0.01)
    assert factor.damping == 0.01
    assert factor.upper.isfinite().all()


@pytest.mark.parametrize(("least", "start", "raised"), [(0.05, 0.01, 0.1), (0.8, 0.05, 1.0)])
def test_damping_is_raised_and_reported(least: float, start: float, raised: float) -> None:
    """A negative eigenvalue needs more than ``least`` of the mean diagonal."""
    hessian = torch.full((2, 2), 1 + least)
    hessian.fill_diagonal_(1.0)  # eigenvalues 2 + least and -least
    assert factorize(hessian, start).damping == pytest.approx(raised)


def test_not_positive_definite_with_the_most_damping() -> None:
    hessian = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    with pytest.raises(CalibrationError, match=r"layers.0.up_proj: not positive definite.*1\.0"):
        factorize(hessian, 0.01, "layers.0.up_proj")


# Scales.


def scale_errors(weight: Tensor, scale: Tensor, importance: Tensor) -> Tensor:
    groups = weight.unflatten(-1, (-1, GROUP))
    step = scale.float().unsqueeze(-1)
    low, high = reference.code_range(4)
    codes = reference.divide_by_scale(groups, step).round().clamp(low, high)
    return ((codes * step - groups).square() * importance.view(-1, GROUP)).sum(-1)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    weighted=st.booleans(),
)
def test_searched_scale_is_no_worse_than_absmax(
    seed: int, dtype: torch.dtype, weighted: bool
) -> None:
    weight = random(5, 96, seed=seed)
    weight[0, :32] = 0
    importance = random(96, seed=seed + 1).square() if weighted else None
    scale = search_scale(weight, GROUP, dtype, importance)
    assert scale.dtype == dtype
    plain = reference.absmax_scale(weight, GROUP, 4, dtype)
    measure = torch.ones(96) if importance is None else importance
    ours, theirs = scale_errors(weight, scale, measure), scale_errors(weight, plain, measure)
    # Scales move by up to 2^-15 of the row's largest when they are stored, codes times as much.
    moved = 8 * 2**-15 * plain.float().amax(-1, keepdim=True)
    slack = moved * measure.view(-1, GROUP).sum(-1).sqrt()
    assert (ours.sqrt() <= theirs.sqrt() + slack).all()
    assert ours.sum() < theirs.sum()
    assert (scale[0, 0] == 0).all()


def test_scale_search_listens_to_importance() -> None:
    weight = torch.full((1, 32), 0.35)
    weight[0, 0] = 7.0  # absmax gives steps of one: all others round to zero
    importance = torch.ones(32)
    importance[0] = 0
    assert search_scale(weight, GROUP, torch.float32, importance).item() < 1
    importance[0] = 1e6
    assert search_scale(weight, GROUP, torch.float32, importance).item() == 1


def test_a_group_of_no_importance_keeps_the_largest_magnitude() -> None:
    weight = random(5, 96)
    importance = torch.ones(96)
    importance[32:64] = 0  # inputs that were zero in the whole calibration
    scale = search_scale(weight, GROUP, torch.float32, importance)
    plain = reference.absmax_scale(weight, GROUP, 4, torch.float32)
    assert torch.equal(scale[:, 1], reference.round_scale(plain, torch.float32)[:, 1])
    assert (scale[:, [0, 2]] < plain[:, [0, 2]]).any()


@pytest.mark.parametrize("block", [1, 200])
def test_scale_search_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are searched each by itself, so blocks change no bit."""
    weight = random(7, 96)
    expected = search_scale(weight, GROUP, torch.bfloat16, random(96, seed=1).square())
    monkeypatch.setattr(gptq, "SEARCH_BLOCK", block)
    scale = search_scale(weight, GROUP, torch.bfloat16, random(96, seed=1).square())
    assert torch.equal(scale, expected)
