"""A nested weight in tiles is the same weight: same codes, same bits out, and back again."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nestq
from nestq import NestedQuantTensor, nest_view
from nestq.tiled_tensor import TiledQuantTensor, in_order_of_device

SHAPES = [(40, 100, 32), (17, 64, 64), (1, 300, 128), (48, 576, 64)]


def weights(rows: int, columns: int, group_size: int) -> tuple[NestedQuantTensor, TiledQuantTensor]:
    torch.manual_seed(0)
    weight = NestedQuantTensor.from_hp(torch.randn(rows, columns), group_size)
    return weight, TiledQuantTensor.from_canonical(weight)


def assert_same(a: NestedQuantTensor, b: NestedQuantTensor) -> None:
    assert type(a) is type(b)
    names, attributes = a.__tensor_flatten__()
    assert b.__tensor_flatten__() == (names, attributes)
    assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_hold_the_same_planes_and_scales(shape: tuple[int, int, int]) -> None:
    weight, tiled = weights(*shape)
    assert tiled.shape == weight.shape
    assert_same(tiled.canonical(), weight)
    for view in ("draft", "target"):
        assert torch.equal(tiled.dequantize(view), weight.dequantize(view))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("view", ["draft", "target"])
def test_linear_gives_the_same_bits(shape: tuple[int, int, int], view: str) -> None:
    weight, tiled = weights(*shape)
    x, bias = torch.randn(3, shape[1]), torch.randn(shape[0])
    with nest_view(view):
        assert torch.equal(F.linear(x, tiled, bias), F.linear(x, weight, bias))


def test_the_base_alone_has_no_target() -> None:
    weight, _ = weights(32, 64, 64)
    tiled = TiledQuantTensor.from_canonical(
        NestedQuantTensor(weight.base, weight.scale, 64, 8, 64, torch.float32)
    )
    with pytest.raises(RuntimeError, match="only the base plane is loaded"):
        F.linear(torch.randn(1, 64), tiled)


def test_rows_are_cut_at_tiles_and_alias() -> None:
    weight, tiled = weights(40, 100, 32)
    part = tiled[16:]
    assert torch.equal(part.dequantize(), weight.dequantize()[16:])
    assert part.base.untyped_storage().data_ptr() == tiled.base.untyped_storage().data_ptr()
    with pytest.raises(NotImplementedError, match="multiples of 16 only, got rows 3 to 40"):
        tiled[3:]
    with pytest.raises(NotImplementedError, match="along rows"):
        tiled[:, 1:]


def test_copies_convert_between_the_orders() -> None:
    weight, tiled = weights(40, 100, 32)
    other, other_tiled = weights(40, 100, 32)
    for plane in (other.base, other_tiled.base):
        plane.zero_()
    other.copy_(tiled)
    other_tiled.copy_(weight)
    assert_same(other, weight)
    assert_same(other_tiled, tiled)


def test_it_can_be_copied_saved_and_cast() -> None:
    _, tiled = weights(40, 100, 32)
    assert_same(copy.deepcopy(tiled), tiled)
    buffer = io.BytesIO()
    torch.save(tiled, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer, weights_only=True), tiled)
    assert tiled.to(torch.float16).dtype == torch.float16
    assert "TiledQuantTensor(shape=(40, 100)" in repr(tiled)


def test_planes_of_another_shape_are_refused_by_name() -> None:
    _, tiled = weights(40, 100, 32)
    arguments = (32, 8, 100, torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"base must be torch\.uint8 of shape"):
        TiledQuantTensor(tiled.base[1:], tiled.scale, tiled.unit, *arguments)
    with pytest.raises(ValueError, match=r"scale must be torch\.int16"):
        TiledQuantTensor(tiled.base, tiled.scale.float(), tiled.unit, *arguments)


def test_a_cpu_reads_the_order_of_files() -> None:
    weight, tiled = weights(40, 100, 32)
    assert_same(in_order_of_device(tiled), weight)
    assert in_order_of_device(weight) is weight


@pytest.mark.gpu
def test_moving_a_model_to_a_gpu_and_back_changes_the_order_only() -> None:
    weight, _ = weights(40, 100, 32)
    linear = nn.Linear(100, 40)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(70, 100)
    expected = linear(x)

    linear.cuda()
    assert type(linear.weight.data) is TiledQuantTensor
    assert torch.equal(linear(x.cuda()).cpu(), expected)
    nestq.select_implementation("reference")
    try:
        assert torch.equal(linear(x.cuda()).cpu(), expected)
    finally:
        nestq.select_implementation("kernels")
    assert_same(linear.cpu().weight.data, weight)


@pytest.mark.gpu
def test_planes_in_the_order_of_files_are_refused_by_the_kernels() -> None:
    weight, _ = weights(40, 100, 32)
    with pytest.raises(ValueError, match="base must lie in tiles on a GPU"):
        torch.ops.nestq.dual_plane_linear(
            torch.randn(1, 100).cuda(),
            weight.base.cuda(),
            None,
            weight.scale.cuda(),
            None,
            None,
            32,
            8,
        )
