"""The fused kernel returns and writes the bits of the reference, in one launch."""

from typing import Any

import pytest
import torch
from kernel_device import device
from torch import Tensor

from nestq.kernels import kv_vectors
from nestq.kernels import rotate_append as kernels
from nestq.reference.rotary import rotate_append


def inputs(
    batch: int, heads: tuple[int, int], count: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Views of one merged linear's output, and angles of float32 rounded to the dtype."""
    query_heads, kv_heads = heads
    merged = torch.randn(batch, count, query_heads + 2 * kv_heads, head_dim).to(dtype)
    query, key, value = merged.transpose(1, 2).split([query_heads, kv_heads, kv_heads], 1)
    angles = 10 * torch.randn(batch, count, head_dim // 2).repeat(1, 1, 2)
    cos, sin = (function(angles).to(dtype) for function in (torch.cos, torch.sin))
    return {"query": query, "key": key, "value": value, "cos": cos, "sin": sin}


def poisoned(batch: int, heads: int, capacity: int, head_dim: int) -> dict[str, Tensor]:
    """Planes of keys and values, full of bytes that a write would change."""
    shape = batch, heads, capacity, head_dim // 2
    planes = {}
    for name in ("key", "value"):
        for plane in ("base", "refinement"):
            planes[f"{name}_{plane}"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        planes[f"{name}_scale"] = torch.full(shape[:-1], -1.0)
    return planes


def check(
    tensors: dict[str, Tensor], positions: Tensor, capacity: int, transform: bool = False
) -> None:
    """Both run; the queries and every byte of the planes are the same."""
    batch, heads, _, head_dim = tensors["key"].shape
    planes = poisoned(batch, heads, capacity, head_dim)
    theirs = {name: plane.clone() for name, plane in planes.items()}
    ours = {name: plane.to(device(), copy=True) for name, plane in planes.items()}
    expected = rotate_append(**tensors, positions=positions, **theirs, transform=transform)
    there = {name: tensor.to(device()) for name, tensor in tensors.items()}
    ours |= {"positions": positions.to(device())}
    out = kernels.rotate_append(**there, **ours, transform=transform)

    assert out.is_contiguous()
    assert out.dtype == expected.dtype
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert torch.equal(out.cpu().view(bits), expected.view(bits))
    for name, plane in theirs.items():
        assert torch.equal(ours[name].cpu(), plane), name


# Triton's interpreter rounds float32 to bfloat16 towards zero.
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16, torch.float32])
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
def test_it_gives_the_bits_of_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    tensors = inputs(2, (3, 1), 3, head_dim, dtype)
    assert not tensors["query"].is_contiguous()
    tensors["key"][0, 0, 1] = 0
    # The second row begins with pads.
    check(tensors, torch.tensor([[7, 2, 0], [-1, -5, 1]]), 9)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16, torch.float32])
@pytest.mark.parametrize("head_dim", [2, 16, 64, 128, 256])
def test_queries_and_keys_may_be_transformed(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    tensors = inputs(2, (3, 1), 3, head_dim, dtype)
    check(tensors, torch.tensor([[7, 2, 0], [-1, -5, 1]]), 9, transform=True)


def test_a_head_in_several_blocks_is_not_transformed_here() -> None:
    arguments: dict[str, Any] = inputs(1, (2, 1), 2, 80, torch.float32)
    arguments |= {"positions": torch.arange(2)[None], **poisoned(1, 1, 8, 80)}
    with pytest.raises(ValueError, match="no power of two, got D = 80"):
        kernels.rotate_append(**arguments, transform=True)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_many_tokens_share_programs(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_vectors, "FEW_VECTORS", 10)
    torch.manual_seed(head_dim)
    positions = torch.randperm(11).repeat(2, 1) - torch.tensor([[0], [5]])
    check(inputs(2, (2, 1), 11, head_dim, torch.float16), positions, 11)


def test_all_rows_may_share_their_angles() -> None:
    tensors = inputs(2, (2, 2), 3, 64, torch.float32)
    shared = {name: tensors[name][:1] for name in ("cos", "sin")}
    check(tensors | shared, torch.tensor([[0, 1, 2], [3, 4, 5]]), 6)


def test_cosines_and_sines_may_have_different_strides() -> None:
    tensors = inputs(1, (2, 1), 3, 64, torch.float32)
    strided = torch.stack((tensors["sin"], tensors["sin"]), 2)[:, :, 0]
    assert strided.stride() != tensors["cos"].stride()
    check(tensors | {"sin": strided}, torch.tensor([[0, 1, 2]]), 3)


def test_no_tokens_are_no_work() -> None:
    check(inputs(2, (2, 1), 0, 64, torch.float32), torch.zeros(2, 0, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 4, 18)}, "query must be"),
        ({"query": torch.zeros(3, 4, 16)}, "query must be"),
        ({"key": torch.zeros(2, 3, 4, 16)}, "key must be torch.float32 of shape"),
        ({"key": torch.zeros(2, 2, 4, 16).half()}, "key must be torch.float32 of shape"),
        ({"value": torch.zeros(2, 2, 3, 16)}, "value must be torch.float32 of shape"),
        ({"cos": torch.zeros(2, 4, 8)}, "cos must be torch.float32 of shape"),
        ({"sin": torch.zeros(2, 4, 16).double()}, "sin must be torch.float32 of shape"),
        ({"sin": torch.zeros(1, 4, 16)}, "sin must have the shape of cos"),
        ({"cos": torch.zeros(2, 16, 4).mT}, "cos must be contiguous along D"),
        ({"query": torch.zeros(2, 6, 16, 4).mT}, "query must be contiguous along D"),
        ({"positions": torch.arange(4)}, "positions must be int64 of shape"),
        ({"positions": torch.zeros(4, 2, dtype=torch.int64).mT}, "positions must be contiguous"),
        ({"key_base": torch.zeros(2, 2, 8, 8)}, "key base must be uint8"),
        ({"key_refinement": torch.zeros(2, 2, 8, 4).byte()}, "key refinement must be"),
        ({"value_scale": torch.zeros(2, 2, 7)}, "value scale must be"),
        ({"value_scale": torch.zeros(2, 8, 2).mT}, "value scale must be contiguous"),
        ({"key_scale": torch.zeros(2, 2, 8, device="meta")}, "key scale must be on the device"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    arguments: dict[str, Any] = inputs(2, (6, 2), 4, 16, torch.float32)
    arguments |= {"positions": torch.arange(4).repeat(2, 1), **poisoned(2, 2, 8, 16)}
    with pytest.raises(ValueError, match=message):
        kernels.rotate_append(**(arguments | change))


def test_float64_is_for_the_reference_only() -> None:
    arguments: dict[str, Any] = inputs(1, (2, 1), 2, 16, torch.float64)
    arguments |= {"positions": torch.arange(2)[None], **poisoned(1, 1, 8, 16)}
    with pytest.raises(ValueError, match="query must be float16, bfloat16 or float32"):
        kernels.rotate_append(**arguments)


def test_values_need_the_shape_of_keys() -> None:
    arguments: dict[str, Any] = inputs(2, (6, 2), 4, 16, torch.float32)
    arguments |= {"positions": torch.arange(4).repeat(2, 1), **poisoned(2, 2, 8, 16)}
    other = poisoned(2, 2, 9, 16)
    arguments |= {name: other[name] for name in other if name.startswith("value")}
    with pytest.raises(ValueError, match="value base must have the shape of key base"):
        kernels.rotate_append(**arguments)
