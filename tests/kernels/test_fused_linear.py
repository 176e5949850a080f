"""``fused_linear`` on a GPU or in the interpreter: the bits of its parts, or a budget of errors."""

from typing import Any

import pytest
import torch
from kernel_device import device
from quantized_planes import Planes
from torch import Tensor

from nestq.kernels import fused_linear as module
from nestq.kernels.fused_linear import fused_linear
from nestq.kernels.linear import linear
from nestq.reference.fused_linear import fused_input
from nestq.reference.linear import quantize_activation
from nestq.reference.weights import dequantize

GROUP_SIZE, OVERLAP, COLUMNS = 64, 8, 300


def random_weights(*rows: int) -> list[Planes]:
    torch.manual_seed(0)
    return [Planes.random(n, COLUMNS, GROUP_SIZE, OVERLAP) for n in rows]


def lists(weights: list[Planes], view: str, together: bool) -> list[Any]:
    """Bases, refinements, scales and units, each apart or side by side in one buffer."""
    planes = [list(kind) for kind in zip(*(one.tiles(device()) for one in weights), strict=True)]
    if together:
        planes = [list(torch.cat(one).split([part.shape[0] for part in one])) for one in planes]
    if view == "draft":
        planes[1] = []
    return planes


def run(
    weights: list[Planes],
    x: Tensor,
    view: str = "target",
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    gate: Tensor | None = None,
    biases: list[Tensor | None] | None = None,
    together: bool = True,
) -> tuple[Tensor, Tensor]:
    on_device = [None if one is None else one.to(device()) for one in (residual, norm_weight, gate)]
    biases = biases or [None] * len(weights)
    biases = [None if one is None else one.to(device()) for one in biases]
    out, total = fused_linear(
        x.to(device()),
        on_device[0],
        on_device[1],
        1e-5,
        on_device[2],
        *lists(weights, view, together),
        biases,
        GROUP_SIZE,
        OVERLAP,
    )
    return out.cpu(), total.cpu()


def expected(weights: list[Planes], value: Tensor, view: str, biases: Any = None) -> Tensor:
    pairs = zip(weights, biases or [None] * len(weights), strict=True)
    return torch.cat([one.linear(value, bias, view) for one, bias in pairs], -1)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Weight rows of each call of ``multiply``."""
    rows = []

    def counted(codes: Tensor, sums: Tensor, step: Tensor, tokens: int, weight: Any, *rest: Any):
        rows.append(weight.unit.shape[0])
        return multiply(codes, sums, step, tokens, weight, *rest)

    multiply = module.multiply
    monkeypatch.setattr(module, "multiply", counted)
    return rows


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("shape", [(300,), (2, 3, 300), (65, 300), (0, 300)])
def test_alone_it_has_the_bits_of_linears(
    shape: tuple[int, ...], view: str, launches: list[int]
) -> None:
    weights, x = random_weights(32, 16, 24), torch.randn(shape)
    biases = [torch.randn(n) for n in (32, 16, 24)]
    reference = expected(weights, x, view, biases)
    for together in (True, False):
        joint = list(torch.cat(biases).to(device()).split([32, 16, 24])) if together else biases
        out, total = run(weights, x, view, biases=joint, together=together)
        assert torch.equal(out, reference)
        assert total.shape == (0,)
    assert launches == ([72, 32, 16, 24] if x.numel() else [])


def test_planes_that_share_a_tile_are_multiplied_apart(launches: list[int]) -> None:
    weights, x = random_weights(24, 16), torch.randn(3, 300)
    out, _ = run(weights, x)
    assert torch.equal(out, expected(weights, x, "target"))
    assert launches == [24, 16]


def test_a_bias_of_one_keeps_them_apart(launches: list[int]) -> None:
    weights, x, bias = random_weights(16, 16), torch.randn(3, 300), torch.randn(16)
    out, _ = run(weights, x, biases=[None, bias])
    assert torch.equal(out, expected(weights, x, "target", [None, bias]))
    assert launches == [16, 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    weights = random_weights(16, 16)
    x, residual = torch.randn(2, 4, 300).to(dtype), torch.randn(4, 2, 300).to(dtype)
    residual = residual.transpose(0, 1)  # rows in another order
    out, total = run(weights, x, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, expected(weights, x + residual, "target"))


def check_within_budget(weights: list[Planes], out: Tensor, value: Tensor) -> None:
    """Compare with linears of a value that the kernel has to rounding.

    Where a value is rounded to the next one of its dtype, its INT8 code may be the next one too.
    That happens to less than 2 of 100 codes (``test_act_quant``), and costs an activation's step
    times the weight: at most the largest weights have it. The step itself, and the result, are
    rounded to the dtype, or in float32 to a few units of sums in another order.
    """
    _, step = quantize_activation(value.reshape(-1, COLUMNS))
    dense = torch.cat(
        [
            dequantize(w.base, w.refinement, w.scale, GROUP_SIZE, OVERLAP, COLUMNS, torch.float32)
            for w in weights
        ]
    )
    largest = dense.abs().topk(-(-2 * COLUMNS // 100)).values.sum(-1)
    reference = expected(weights, value, "target").float()
    relative = 2 * max(torch.finfo(value.dtype).eps, 2**-20)
    budget = step.view(*value.shape[:-1], 1) * largest + relative * reference.abs()
    assert ((out.float() - reference).abs() <= budget).all()
    # It is tight: a tenth of what a wrong value of the same size would give.
    assert budget.mean() < 0.1 * reference.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_norm_comes_first(with_residual: bool, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and device().type == "cpu":
        pytest.skip("the interpreter does not add and multiply bfloat16 numbers")
    weights = random_weights(16, 32)
    x, residual = (torch.randn(2, 3, COLUMNS).to(dtype) for _ in "xr")
    norm_weight = (torch.rand(COLUMNS) + 0.5).to(dtype)
    given = residual if with_residual else None
    out, total = run(weights, x, residual=given, norm_weight=norm_weight)
    value, expected_total = fused_input(x, given, norm_weight, 1e-5, None)
    assert torch.equal(total, expected_total)
    check_within_budget(weights, out, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [5, 66])
def test_a_gate_comes_first(tokens: int, dtype: torch.dtype) -> None:
    weights = random_weights(16)
    both = torch.randn(tokens, 2 * COLUMNS).to(dtype)  # halves of a linear that gave both
    gate, up = both[:, :COLUMNS], both[:, COLUMNS:]
    out, total = run(weights, up, gate=gate)
    assert total.shape == (0,)
    check_within_budget(weights, out, fused_input(up, None, None, 0.0, gate)[0])


def test_many_tokens_are_normed_too() -> None:
    weights = random_weights(16)
    x, residual = torch.randn(65, COLUMNS), torch.randn(65, COLUMNS)
    norm_weight = torch.rand(COLUMNS) + 0.5
    out, total = run(weights, x, residual=residual, norm_weight=norm_weight)
    assert torch.equal(total, x + residual)
    few, _ = run(weights, x[:5], residual=residual[:5], norm_weight=norm_weight)
    assert torch.equal(out[:5], few)


def test_bad_arguments_are_refused_by_name() -> None:
    weights = random_weights(16, 16)
    bases, refinements, scales, units = lists(weights, "target", False)
    x, bias = torch.randn(2, COLUMNS, device=device()), torch.randn(16, device=device())
    norm_weight = torch.ones(COLUMNS, device=device())
    nothing = (None, None, 0.0, None)

    def refused(match: str, *args: Any, options: tuple[int, int] = (GROUP_SIZE, OVERLAP)) -> None:
        with pytest.raises(ValueError, match=match):
            fused_linear(*args, *options)

    planes = bases, refinements, scales, units, [None, None]
    refused("bases must have at least one weight", x, *nothing, [], [], [], [], [])
    for index, name in enumerate(("refinements", "scales", "units", "biases"), start=1):
        short = list(planes)
        short[index] = short[index][:1]
        message = f"{name} must have an entry for each of 2 bases, got 1"
        refused(message, x, *nothing, *short)
    refused("base must lie in tiles", x, *nothing, bases, refinements, scales, [], [None] * 2)
    refused("bias must have shape", x, *nothing, *planes[:4], [bias, bias[:3]])
    refused("x must be float16, .*got torch.float64", x.double(), *nothing, *planes)
    refused("x must have as many columns as the weight", x[:, :64], *nothing, *planes)
    refused("overlap must be from 1 to 16", x, *nothing, *planes, options=(GROUP_SIZE, 17))
    refused("group_size must be one of", x, *nothing, *planes, options=(48, OVERLAP))
    refused("residual must be torch.float32 of shape", x, x[:1], None, 0.0, None, *planes)
    refused("gate must be .* got torch.float16", x, None, None, 0.0, x.half(), *planes)
    refused("gate must be None where there is", x, x, None, 0.0, x, *planes)
    refused("gate must be None where there is", x, None, norm_weight, 0.0, x, *planes)
    refused("norm_weight must have shape", x, None, norm_weight[:5], 0.0, None, *planes)
    refused("norm_weight must be torch.float32", x, None, norm_weight.half(), 0.0, None, *planes)


def test_one_weight_is_a_linear() -> None:
    (weight,), x = random_weights(40), torch.randn(3, COLUMNS, device=device())
    base, refinement, scale, unit = weight.tiles(device())
    out, _ = fused_linear(
        *(x, None, None, 0.0, None, [base], [refinement], [scale], [unit], [None]),
        *(GROUP_SIZE, OVERLAP),
    )
    assert torch.equal(out, linear(x, base, refinement, scale, unit, None, GROUP_SIZE, OVERLAP))
