"""``nestq::fused_linear`` on a CPU: transformers' bits, and one linear after the other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nested_tensors import make, random
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from nestq.reference.fused_linear import fused_input
from nestq.tensor import NestedQuantTensor, linear_in_view
from nestq.tiled_tensor import TiledQuantTensor
from nestq.view import nest_view

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
X, RESIDUAL = random(2, 3, 100), random(2, 3, 100, seed=1)
NORM_WEIGHT = 1 + 0.2 * random(100, seed=2)


def fused_linear(
    weights: list[NestedQuantTensor],
    view: str,
    x: Tensor,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    gate: Tensor | None = None,
    biases: list[Tensor | None] | None = None,
) -> Any:
    both, in_tiles = view == "target", weights[0].unit is not None
    return torch.ops.nestq.fused_linear(
        *(x, residual, norm_weight, 1e-6, gate),
        [one.base for one in weights],
        [one.refinement for one in weights] if both else [],
        [one.scale for one in weights],
        [one.unit for one in weights] if in_tiles else [],
        [None] * len(weights) if biases is None else biases,
        *(32, 8),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_transformers_own(dtype: torch.dtype) -> None:
    module = LlamaRMSNorm(100, 1e-6).to(dtype).requires_grad_(False)
    module.weight.copy_(NORM_WEIGHT)
    x, residual = X.to(dtype), RESIDUAL.to(dtype)
    value, total = fused_input(x, residual, module.weight, 1e-6, None)
    assert torch.equal(total, residual + x)
    assert torch.equal(value, module(residual + x))
    value, total = fused_input(x, None, module.weight, 1e-6, None)
    assert torch.equal(value, module(x))
    assert total.shape == (0,)
    assert total.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_that_of_a_view(dtype: torch.dtype) -> None:
    gate, up = X.to(dtype), RESIDUAL.to(dtype)
    value, total = fused_input(up, None, None, 0.0, gate)
    with nest_view("target"):
        assert torch.equal(value, F.silu(gate) * up)
    assert total.shape == (0,)


def test_a_gate_excludes_the_rest() -> None:
    for arguments in ((RESIDUAL, None), (None, NORM_WEIGHT)):
        with pytest.raises(ValueError, match="gate must be None where there is a residual"):
            fused_input(X, *arguments, 1e-6, X)


@pytest.mark.parametrize("view", ["draft", "target"])
@pytest.mark.parametrize("order", [NestedQuantTensor, TiledQuantTensor])
def test_results_lie_side_by_side(order: type[NestedQuantTensor], view: str) -> None:
    weights = [order.in_own_order(make(rows)) for rows in (24, 7, 16)]
    biases = [random(24, seed=4), None, random(16, seed=5)]
    out, total = fused_linear(weights, view, X, RESIDUAL, NORM_WEIGHT, biases=biases)
    value, expected_total = fused_input(X, RESIDUAL, NORM_WEIGHT, 1e-6, None)
    parts = [linear_in_view(value, w, b, view) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(out, torch.cat(parts, -1))
    assert torch.equal(total, expected_total)


def test_a_row_does_not_depend_on_other_rows() -> None:
    weights = [make(24), make(8)]
    for options in ({"residual": RESIDUAL, "norm_weight": NORM_WEIGHT}, {"gate": RESIDUAL}):
        out, total = fused_linear(weights, "target", X, **options)
        some = {name: one[1:, 1:2] if one.dim() == 3 else one for name, one in options.items()}
        row, row_total = fused_linear(weights, "target", X[1:, 1:2], **some)
        assert torch.equal(row, out[1:, 1:2])
        assert "gate" in options or torch.equal(row_total, total[1:, 1:2])


@pytest.mark.parametrize("order", [NestedQuantTensor, TiledQuantTensor])
def test_the_operator_is_what_compilers_expect(order: type[NestedQuantTensor]) -> None:
    weights = [order.in_own_order(make(rows)) for rows in (24, 7)]
    strided = RESIDUAL.mT.contiguous().mT
    planes = [[getattr(w, name) for w in weights] for name in ("base", "refinement", "scale")]
    units = [w.unit for w in weights] if order is TiledQuantTensor else []
    rest = (units, [random(24), None], 32, 8)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for start in (
        (strided, strided, NORM_WEIGHT, 1e-6, None),
        (X, None, None, 0.0, strided),
        (X, None, None, 0.0, None),
    ):
        torch.library.opcheck(
            torch.ops.nestq.fused_linear.default, (*start, *planes, *rest), test_utils=tests
        )


def test_the_gate_of_a_module() -> None:
    """As transformers' MLP computes it before its last linear."""
    config: Any = type("Config", (), {})()
    vars(config).update(hidden_size=8, intermediate_size=100, mlp_bias=False, hidden_act="silu")
    mlp = LlamaMLP(config)
    seen: list[Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = random(5, 8)
    with torch.no_grad(), nest_view("target"):
        mlp(x)
        value, _ = fused_input(mlp.up_proj(x), None, None, 0.0, mlp.gate_proj(x))
    assert torch.equal(value, seen[0])
