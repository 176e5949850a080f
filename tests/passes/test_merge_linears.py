"""``merge_linears``: what it merges, what it leaves alone, and that results stay the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nested_tensors import random
from rewriting import Rewriting, rewritten, weights
from torch import Tensor

from nestq.tensor import NestedQuantTensor, linear_in_view

Q, K, V = weights(3)
X = random(2, 5, 48)


def merges(function: Callable[..., Any], *args: Any) -> int:
    backend = rewritten(function, *args)
    merged = backend.matches[0]["merge_linears"]
    assert (merged == 0) == (not backend.calls("fused_linear"))
    return merged


def heads(x: Tensor, count: int) -> Tensor:
    """As attention makes them of the columns of a linear."""
    return x.view(*x.shape[:-1], count, -1).transpose(1, 2)


def test_linears_of_one_input_become_one_call() -> None:
    def attention_inputs(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(heads(F.linear(x, w), 4) * 2 for w in (Q, K, V))

    backend = rewritten(attention_inputs, X)
    assert backend.matches[0]["merge_linears"] == 1
    assert not backend.calls("dual_plane_linear")
    (fused,) = backend.calls("fused_linear")
    assert [len(argument) for argument in fused.args[5:10]] == [3, 3, 3, 0, 3]
    assert fused.meta["example_value"][0].shape == (2, 5, 24 + 32 + 40)
    views = [node for node in backend.graphs[0].nodes if node.target == "transpose"]
    assert views[0].meta["example_value"].stride() == (5 * 96, 6, 96, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_may_have_a_bias(dtype: torch.dtype) -> None:
    def with_bias(x: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([F.linear(x, Q) * 2, F.linear(x, K, bias) * 2], -1)

    backend = rewritten(with_bias, random(5, 48).to(dtype), random(32).to(dtype))
    assert backend.matches[0]["merge_linears"] == 1


def test_two_inputs_have_two_calls() -> None:
    def two_inputs(x: Tensor, y: Tensor) -> Tensor:
        products = [F.linear(one, w) * 2 for w in (Q, K) for one in (x, y)]
        return torch.cat(products, -1)

    assert merges(two_inputs, X, X + 1) == 2


def test_a_graph_of_any_number_of_rows() -> None:
    torch._dynamo.reset()
    backend = Rewriting()

    def function(x: Tensor) -> Tensor:
        parts = (heads(linear_in_view(x, w, None, "target"), 4) * 2 for w in (Q, K, V))
        return torch.cat(list(parts), -1)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for rows in (5, 2, 7):
        x = random(2, rows, 48)
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), function(x))
    assert [one["merge_linears"] for one in backend.matches] == [1]


def other(weight: NestedQuantTensor, **options: int) -> NestedQuantTensor:
    return NestedQuantTensor.from_hp(weight.dequantize(), **{"group_size": 32, **options})


def test_weights_with_other_options_stay_apart() -> None:
    for weight in (other(Q, overlap=16), other(Q, group_size=64)):

        def function(x: Tensor, weight: NestedQuantTensor = weight) -> Tensor:
            return torch.cat([F.linear(x, K) * 2, F.linear(x, weight) * 2], -1)

        assert merges(function, X) == 0


def test_the_draft_and_the_target_stay_apart() -> None:
    def function(x: Tensor) -> Tensor:
        return linear_in_view(x, Q, None, "draft") @ linear_in_view(x, Q, None, "target").mT

    assert merges(function, X) == 0


def returned(x: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, Q), F.linear(x, K) * 2


def returned_as_view(x: Tensor) -> tuple[Tensor, ...]:
    return heads(F.linear(x, Q), 4), F.linear(x, K) * 2


def viewed_flat(x: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, Q).view(-1) * 2, F.linear(x, K) * 2


def viewed_flat_behind_a_view(x: Tensor) -> tuple[Tensor, ...]:
    one = F.linear(x, Q).unsqueeze(0)[0]
    return one.view(2, -1) * 2, F.linear(x, K) * 2


def written_result(x: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, Q).mul_(2) + 1, F.linear(x, K) * 2


def written_input(x: Tensor) -> tuple[Tensor, ...]:
    one = F.linear(x, Q) * 2
    x.add_(1)
    return one, F.linear(x, K) * 2


def weight_made_in_between(x: Tensor) -> tuple[Tensor, ...]:
    one = F.linear(x, Q) * 2
    made = torch.ops.nestq.dual_plane_linear(
        x, K.base, K.refinement, K.scale * one.sum().isfinite(), None, None, 32, 8
    )
    return one, made * 2


@pytest.mark.parametrize(
    "function",
    [
        returned,
        returned_as_view,
        viewed_flat,
        viewed_flat_behind_a_view,
        written_result,
        written_input,
        weight_made_in_between,
    ],
)
def test_what_must_stay_apart_stays_apart(function: Callable[..., Any]) -> None:
    assert merges(function, X) == 0
