"""``fuse_act_quant``: what joins a linear, what does not, and that results stay the same bits."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nested_tensors import random
from rewriting import Rewriting, rewritten, weights
from torch import Tensor
from torch.fx import Node
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

W, U = weights(2)
X, R = random(2, 5, 48), random(2, 5, 48, seed=1)
G = 1 + 0.2 * random(48, seed=2)
EPS = 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' modules have it."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return weight * x.to(dtype)


def norm_of_functions(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    variance = torch.mean(torch.pow(wide, 2), dim=-1, keepdim=True)
    scaled = torch.mul(torch.rsqrt(torch.add(variance, EPS)), wide)
    return torch.mul(scaled.to(dtype=x.dtype), weight)


def norm_of_operators(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    scaled = operator.mul((EPS + (wide**2).mean([-1], True)).rsqrt(), wide)
    return scaled.to(x.dtype) * weight


def start_of(backend: Rewriting) -> dict[str, Any]:
    """What the one ``fused_linear`` does before it multiplies."""
    (fused,) = backend.calls("fused_linear")
    names = ("x", "residual", "norm_weight", "eps", "gate")
    return dict(zip(names, fused.args, strict=False))


def matches(function: Callable[..., Any], *args: Any) -> int:
    backend = rewritten(function, *args)
    found = backend.matches[0]["fuse_act_quant"]
    fused = backend.calls("fused_linear")
    assert found == sum(one.args[1:5] != (None, None, 0.0, None) for one in fused)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [norm, norm_of_functions, norm_of_operators])
def test_a_norm_joins_in_every_spelling(form: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def function(x: Tensor, g: Tensor) -> Tensor:
        return F.linear(form(x, g), W)

    backend = rewritten(function, X.to(dtype), G.to(dtype))
    assert backend.matches[0]["fuse_act_quant"] == 1
    start = start_of(backend)
    assert (start["residual"], start["eps"], start["gate"]) == (None, EPS, None)
    assert [node.op for node in backend.graphs[0].nodes].count("call_method") == 0


def test_transformers_own_norm_joins() -> None:
    module = LlamaRMSNorm(48, EPS).requires_grad_(False)
    module.weight.copy_(G)
    assert matches(lambda x: F.linear(module(x), W), X) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_the_residual_comes_out(dtype: torch.dtype) -> None:
    def function(x: Tensor, residual: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        normed = norm(total, g)
        products = F.linear(normed, W) * 2, F.linear(normed, U) * 2
        return *products, total, total * 2

    backend = rewritten(function, X.to(dtype), R.to(dtype), G.to(dtype))
    assert backend.matches[0] == {"merge_linears": 1, "fuse_act_quant": 1, "nested_kv": 0}
    start = start_of(backend)
    assert all(isinstance(start[name], Node) for name in ("x", "residual", "norm_weight"))
    assert sum(node.target is operator.add for node in backend.graphs[0].nodes) == 0


def test_a_sum_that_is_read_before_stays() -> None:
    def function(x: Tensor, residual: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        early = total * 2
        return F.linear(norm(total, g), W), early

    backend = rewritten(function, X, R, G)
    start = start_of(backend)
    assert start["residual"] is None
    assert start["norm_weight"] is not None


def test_a_sum_whose_dtype_changes_stays() -> None:
    def function(x: Tensor, residual: Tensor, g: Tensor) -> Tensor:
        return F.linear(norm(x + residual, g), W)

    backend = rewritten(function, X.bfloat16(), R, G)
    assert start_of(backend)["residual"] is None


def test_a_sum_of_other_shapes_stays() -> None:
    def function(x: Tensor, residual: Tensor, g: Tensor) -> Tensor:
        return F.linear(norm(x + residual, g), W)

    backend = rewritten(function, X, R[:, :1].contiguous(), G)
    assert start_of(backend)["residual"] is None


def test_a_sum_whose_strides_somebody_needs_stays() -> None:
    def function(x: Tensor, residual: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return F.linear(norm(total, g), W), total.mT.view(2, -1) * 2

    args = (one.mT.contiguous().mT for one in (X, R))
    backend = rewritten(function, *args, G)
    assert start_of(backend)["residual"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_gate_joins(swapped: bool, dtype: torch.dtype) -> None:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        active = F.silu(gate)
        return F.linear(up * active if swapped else active * up, W)

    backend = rewritten(function, X.to(dtype), R.to(dtype))
    assert backend.matches[0]["fuse_act_quant"] == 1
    placeholders = [node for node in backend.graphs[0].nodes if node.op == "placeholder"]
    start = start_of(backend)
    assert start["gate"] in placeholders
    assert start["x"] in placeholders


def test_halves_of_one_linear_gate_each_other() -> None:
    (down,) = weights(1, columns=12)

    def function(x: Tensor) -> Tensor:
        gate, up = F.linear(x, W).chunk(2, dim=-1)
        return F.linear(up * F.silu(gate), down)

    assert matches(function, X) == 1


@pytest.mark.parametrize("keep", [1, 3, 0])
def test_rows_are_selected_before_the_norm(keep: int) -> None:
    def function(x: Tensor, residual: Tensor, g: Tensor) -> Tensor:
        return F.linear(norm(x + residual, g)[:, slice(-keep, None), :], W)

    backend = rewritten(function, X, R, G)
    start = start_of(backend)
    for name in ("x", "residual"):
        assert start[name].target is operator.getitem
    assert len(backend.calls("fused_linear")) == 1


def test_rows_of_a_sum_that_is_read_later_are_selected_from_the_sum() -> None:
    def function(x: Tensor, residual: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return F.linear(norm(total, g)[:, -1:], W), total

    backend = rewritten(function, X, R, G)
    assert start_of(backend)["residual"] is None


def columns_selected(x: Tensor, g: Tensor) -> Tensor:
    return F.linear(norm(torch.cat([x, x], -1), torch.cat([g, g]))[:, :, :48], W)


def one_row_selected(x: Tensor, g: Tensor) -> Tensor:
    return F.linear(norm(x, g)[:, -1], W)


def normed_read_twice(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    normed = norm(x, g)
    return F.linear(normed, W), normed * 2


def variance_read_twice(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    normed = g * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)
    return F.linear(normed, W), variance


def written_in_between(x: Tensor, g: Tensor) -> Tensor:
    normed = norm(x, g)
    x.mul_(2)
    return F.linear(normed, W)


def weight_written_in_between(x: Tensor, g: Tensor) -> Tensor:
    normed = norm(x, g)
    g += 1
    return F.linear(normed, W)


def no_epsilon(x: Tensor, g: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return F.linear(g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype), W)


def epsilon_for_each_row(x: Tensor, g: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return F.linear(g * (wide * torch.rsqrt(variance + x[..., :1].abs())).to(x.dtype), W)


def mean_of_all(x: Tensor, g: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean([1, 2], keepdim=True)
    return F.linear(g * (wide * torch.rsqrt(variance + EPS)).to(x.dtype), W)


def cubes(x: Tensor, g: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(4).mean(-1, keepdim=True)
    return F.linear(g * (wide * torch.rsqrt(variance + EPS)).to(x.dtype), W)


def norm_of_another(x: Tensor, g: Tensor) -> Tensor:
    wide, other = x.to(torch.float32), (x + 1).to(torch.float32)
    variance = other.pow(2).mean(-1, keepdim=True)
    return F.linear(g * (wide * torch.rsqrt(variance + EPS)).to(x.dtype), W)


def weight_for_each_row(x: Tensor, g: Tensor) -> Tensor:
    return F.linear(norm(x, x + g), W)


def weight_of_another_dtype(x: Tensor, g: Tensor) -> Tensor:
    return F.linear(norm(x.bfloat16(), g), W)


@pytest.mark.parametrize(
    "function",
    [
        columns_selected,
        one_row_selected,
        normed_read_twice,
        variance_read_twice,
        written_in_between,
        weight_written_in_between,
        no_epsilon,
        epsilon_for_each_row,
        mean_of_all,
        cubes,
        norm_of_another,
        weight_for_each_row,
        weight_of_another_dtype,
    ],
)
def test_what_only_looks_like_a_norm_is_left_alone(function: Callable[..., Any]) -> None:
    assert matches(function, X, G) == 0


def test_gemmas_norm_is_left_alone() -> None:
    module = Gemma2RMSNorm(48, EPS).requires_grad_(False)
    module.weight.copy_(G)
    assert matches(lambda x: F.linear(module(x), W), X) == 0


def gated_by_relu(gate: Tensor, up: Tensor) -> Tensor:
    return F.linear(F.relu(gate) * up, W)


def gated_in_place(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return F.linear(F.silu(gate, inplace=True) * up, W), gate


def gate_written_by_an_argument(gate: Tensor, up: Tensor) -> Tensor:
    gated = F.silu(gate) * up
    F.relu(gate, True)
    return F.linear(gated, W)


def activation_read_twice(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    active = F.silu(gate)
    return F.linear(active * up, W), active


def gated_read_twice(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    gated = F.silu(gate) * up
    return F.linear(gated, W), gated


def gate_of_one_row(gate: Tensor, up: Tensor) -> Tensor:
    return F.linear(F.silu(gate[:, :1]) * up, W)


def gate_written_in_between(gate: Tensor, up: Tensor) -> Tensor:
    gated = F.silu(gate) * up
    gate[0] = 1
    return F.linear(gated, W)


def gate_of_another_dtype(gate: Tensor, up: Tensor) -> Tensor:
    return F.linear(F.silu(gate.bfloat16()) * up, W)


@pytest.mark.parametrize(
    "function",
    [
        gated_by_relu,
        gated_in_place,
        gate_written_by_an_argument,
        activation_read_twice,
        gated_read_twice,
        gate_of_one_row,
        gate_written_in_between,
        gate_of_another_dtype,
    ],
)
def test_what_only_looks_like_a_gate_is_left_alone(function: Callable[..., Any]) -> None:
    assert matches(function, X, R) == 0


def test_what_autograd_follows_is_left_alone() -> None:
    weight = G.clone().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return F.linear(norm(x, weight), W)

    assert matches(function, X) == 0
    with torch.no_grad():
        assert matches(function, X) == 1
