"""Nested tensors to test with, and what it means that two are the same."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from nestq.tensor import NestedQuantTensor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(rows: int = 24, in_features: int = 100, group_size: int = 32, overlap: int = 8) -> Any:
    return NestedQuantTensor.from_hp(random(rows, in_features), group_size, overlap)


def parts(tensor: NestedQuantTensor) -> dict[str, Tensor]:
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def assert_same_bytes(one: NestedQuantTensor, other: NestedQuantTensor) -> None:
    assert type(one) is type(other) is NestedQuantTensor
    assert one.shape == other.shape
    assert (one.group_size, one.overlap) == (other.group_size, other.overlap)
    assert parts(one).keys() == parts(other).keys()
    for name, plane in parts(one).items():
        assert plane.dtype == parts(other)[name].dtype, name
        assert torch.equal(plane, parts(other)[name]), name


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, NestedQuantTensor]:
    """A dense weight and its nested tensor."""
    rows = draw(st.integers(1, 5))
    in_features = draw(st.one_of(st.sampled_from([1, 31, 576, 1000]), st.integers(1, 300)))
    weight = random(rows, in_features, seed=draw(st.integers(0, 2**31)))
    weight *= draw(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]))
    if draw(st.booleans()):
        weight[:] = weight[:, :1].clone()
    group_size, overlap = draw(st.sampled_from([32, 64, 128])), draw(st.integers(1, 16))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    return weight, NestedQuantTensor.from_hp(weight, group_size, overlap, dtype)
