"""Everything that PyTorch does to a ``NestedQuantTensor`` keeps its codes."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nested_tensors import assert_same_bytes, make, parts, random, tensors
from torch import Tensor, nn

from nestq.tensor import NestedQuantTensor

VIEWS = ("draft", "target")


def through_bytes(tensor: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


@pytest.mark.parametrize(
    "operation",
    [
        Tensor.clone,
        Tensor.detach,
        Tensor.contiguous,
        copy.copy,
        copy.deepcopy,
        lambda tensor: pickle.loads(pickle.dumps(tensor)),
        lambda tensor: through_bytes(tensor, weights_only=True),
        lambda tensor: through_bytes(tensor, weights_only=True, mmap=False, map_location="cpu"),
        lambda tensor: tensor.to("cpu", copy=True),
        lambda tensor: tensor.cpu(),
        Tensor.half,
        Tensor.bfloat16,
        Tensor.float,
        Tensor.double,
        lambda tensor: tensor.to("cpu", torch.float16),
        lambda tensor: tensor.to(random(1).half()),
        lambda tensor: tensor[0:24],
    ],
)
@pytest.mark.parametrize("has_refinement", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_codes_survive(
    operation: Callable[[Tensor], Tensor], has_refinement: bool, inference: bool
) -> None:
    with torch.inference_mode(inference):
        nested = make()
        if not has_refinement:
            nested.refinement = None
        original = {name: plane.clone() for name, plane in parts(nested).items()}
        result = operation(nested)
        for name, plane in original.items():
            assert torch.equal(getattr(nested, name), plane)
        assert_same_bytes(result, nested)


def test_dtype_changes_what_it_stands_for() -> None:
    half = make().half()
    assert half.dtype == half.hp_dtype == torch.float16
    assert half.scale.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="hp_dtype must be a floating-point dtype"):
        make().to(torch.int8)


def test_to_meta_moves_everything() -> None:
    meta = make().to("meta")
    assert {meta.device.type, *(plane.device.type for plane in parts(meta).values())} == {"meta"}


def test_copies_do_not_alias() -> None:
    nested = make()
    for result in (nested.clone(), copy.deepcopy(nested), nested.to("cpu", copy=True)):
        result.base.bitwise_not_()
        assert_same_bytes(nested, make())


@given(tensors(), st.integers(0, 5), st.integers(0, 5))
def test_row_slices_alias(
    sample: tuple[Tensor, NestedQuantTensor], start: int, length: int
) -> None:
    _, nested = sample
    before = nested.clone()
    rows = nested[start : start + length]
    assert type(rows) is NestedQuantTensor
    assert rows.shape == nested.dequantize()[start : start + length].shape
    for name, plane in parts(rows).items():
        assert torch.equal(plane, getattr(nested, name)[start : start + length])
    for view in VIEWS:
        assert torch.equal(rows.dequantize(view), nested.dequantize(view)[start : start + length])
    rows.base.bitwise_not_()
    rows.refinement.bitwise_not_()
    inside = torch.zeros(nested.shape[0], dtype=torch.bool)
    inside[start : start + length] = True
    for name in ("base", "refinement"):
        changed = (getattr(nested, name) != getattr(before, name)).all(dim=-1)
        assert torch.equal(changed, inside)


def test_writing_into_a_slice_writes_into_the_whole() -> None:
    nested, other = make(), NestedQuantTensor.from_hp(random(4, 100, seed=1), 32, 8)
    nested[3:7].copy_(other)
    assert_same_bytes(nested[3:7], other)
    assert_same_bytes(nested[7:], make()[7:])


@pytest.mark.parametrize("index", [(slice(None), slice(0, 32)), slice(0, 4, 2)])
def test_other_slices_are_refused(index: Any) -> None:
    with pytest.raises(NotImplementedError, match="along rows"):
        make()[index]


def test_copy_keeps_the_dtype_of_the_destination() -> None:
    destination = NestedQuantTensor.from_hp(random(24, 100, seed=1), 32, 8).half()
    assert destination.copy_(make()) is destination
    assert_same_bytes(destination, make())
    assert destination.dtype == torch.float16


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (random(24, 100), "source must be a NestedQuantTensor, got Tensor"),
        (make(overlap=16), "'overlap': 8.*'overlap': 16"),
        (make(group_size=64), "'group_size': 32.*'group_size': 64"),
        (make(in_features=101), r"\(24, 100\).*\(24, 101\)"),
        (NestedQuantTensor.from_hp(random(24, 100), 32, 8, torch.float32), "bfloat16.*float32"),
    ],
)
def test_copy_that_would_change_codes(source: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().copy_(source)


def linear_of(nested: NestedQuantTensor) -> nn.Linear:
    linear = nn.Linear(nested.shape[1], nested.shape[0])
    linear.weight = nn.Parameter(nested, requires_grad=False)
    return linear


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_state_dict(assign: bool, saved: bool) -> None:
    source, destination = linear_of(make()), linear_of(make().clone().half())
    destination.weight.base.zero_()
    state = source.state_dict()
    if saved:
        state = through_bytes(state, weights_only=True)
    assert destination.load_state_dict(state, assign=assign, strict=True)
    assert_same_bytes(destination.weight, make())
    assert destination.weight.dtype == (torch.float32 if assign else torch.float16)
    assert isinstance(destination.weight, nn.Parameter)
    assert not destination.weight.requires_grad


@pytest.mark.parametrize(
    "operation",
    [
        lambda module: module.half(),
        lambda module: module.to(torch.bfloat16),
        lambda module: module.double().float(),
        lambda module: module.to("cpu"),
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: through_bytes(module, weights_only=False),
    ],
)
def test_module_operations(operation: Callable[[nn.Module], nn.Linear]) -> None:
    result = operation(linear_of(make()))
    assert_same_bytes(result.weight, make())
    assert isinstance(result.weight, nn.Parameter)
    assert not result.weight.requires_grad
    assert result.weight.dtype == result.bias.dtype


def test_repr() -> None:
    expected = (
        "NestedQuantTensor(shape=(24, 100), planes=base + refinement, group_size=32, overlap=8, "
        "scale=torch.bfloat16, dtype=torch.float32, device=cpu)"
    )
    assert repr(make()) == str(make()) == expected
    assert repr(nn.Parameter(make(), requires_grad=False)) == expected
    nested = make()
    nested.refinement = None
    assert "planes=base, " in repr(nested)


def test_compiled_graphs_are_kept_for_what_they_depend_on() -> None:
    def key(**options: Any) -> str:
        return NestedQuantTensor.from_hp(torch.ones(4, 64), **options)._stable_hash_for_caching()

    assert key() == key()
    others = [key(group_size=64), key(overlap=16), key(scale_dtype=torch.float32)]
    assert len({key(), *others}) == 4
    half = NestedQuantTensor.from_hp(torch.ones(4, 64)).half()
    assert half._stable_hash_for_caching() != key()
