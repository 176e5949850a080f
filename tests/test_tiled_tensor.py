"""A nested weight in tiles is the same weight: same codes, same bits out, and back again."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nestq
from nestq import NestedQuantTensor, nest_view
from nestq.reference.weights import unpack_base, unpack_refinement
from nestq.tiled_tensor import TiledQuantTensor

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


@pytest.mark.parametrize("rows", [slice(40, None), slice(50, 60), slice(3, 3), slice(0, 0)])
def test_no_rows_are_an_empty_weight(rows: slice) -> None:
    weight, tiled = weights(40, 100, 32)
    empty = tiled[rows]
    assert type(empty) is TiledQuantTensor
    assert empty.shape == weight[rows].shape == (0, 100)
    assert_same(empty.canonical(), weight[rows])
    assert_same(TiledQuantTensor.from_canonical(weight[rows]), empty)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("made_in_inference_mode", [True, False])
def test_rows_can_be_cut_in_inference_mode(tiled: bool, made_in_inference_mode: bool) -> None:
    with torch.inference_mode(made_in_inference_mode):
        weight = weights(40, 100, 32)[tiled]
        expected = weight[16:].clone()
    with torch.inference_mode():
        part = weight[16:]
        assert_same(part, expected)
        assert part.is_inference() == made_in_inference_mode
        part.base.fill_(0x77)
    assert (weight.base[1 if tiled else 16 :] == 0x77).all()
    assert (weight.base[: 1 if tiled else 16] != 0x77).any()


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
    with pytest.raises(ValueError, match=r"on one device, got base on cpu, .*unit on meta"):
        TiledQuantTensor(tiled.base, tiled.scale, tiled.unit.to("meta"), *arguments)


@pytest.mark.parametrize("name", ["hp_dtype", "scale_dtype"])
@pytest.mark.parametrize("dtype", [torch.int32, "float32"])
def test_dtypes_that_are_not_floating_point_are_refused(name: str, dtype: Any) -> None:
    _, tiled = weights(40, 100, 32)
    names, attributes = tiled.__tensor_flatten__()
    planes = {plane: getattr(tiled, plane) for plane in names}
    with pytest.raises(ValueError, match=f"{name} must be a floating-point dtype, got"):
        TiledQuantTensor(**planes, **attributes | {name: dtype})


def test_a_cpu_reads_the_order_of_files() -> None:
    weight, tiled = weights(40, 100, 32)
    assert_same(tiled.in_order_of_device(), weight)
    assert weight.in_order_of_device() is weight


def test_a_file_of_a_gpu_is_put_in_the_order_of_a_cpu() -> None:
    weight, tiled = weights(40, 100, 32)
    buffer = io.BytesIO()
    torch.save({"weight": nn.Parameter(tiled, requires_grad=False)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True, map_location="cpu")["weight"]
    assert type(loaded) is TiledQuantTensor
    assert_same(loaded.in_order_of_device(), weight)


def nest(order: type[NestedQuantTensor]) -> list[NestedQuantTensor]:
    """One weight, by every way that makes one."""
    torch.manual_seed(0)
    dense = torch.randn(40, 128)
    weight = order.from_hp(dense, 32)
    stored = weight.canonical()
    assert stored.refinement is not None
    codes = (unpack_base(stored.base, 32), unpack_refinement(stored.refinement, 32))
    options: Any = {"group_size": 32, "overlap": 8, "in_features": 128}
    again = order.from_codes(*codes, stored.scale, **options, hp_dtype=dense.dtype)
    return [weight, again, weight.half().float()]


def test_tiles_can_be_made_without_a_gpu() -> None:
    expected = TiledQuantTensor.from_canonical(nest(NestedQuantTensor)[0])
    for weight in nest(TiledQuantTensor)[:2]:
        assert_same(weight, expected)


def test_what_makes_a_weight_leaves_its_order_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = TiledQuantTensor.from_canonical(nest(NestedQuantTensor)[0])
    monkeypatch.setattr(
        NestedQuantTensor, "in_order_of_device", lambda w: TiledQuantTensor.in_own_order(w)
    )
    for weight in nest(NestedQuantTensor):
        assert_same(weight, expected)


@pytest.mark.gpu
def test_weights_made_on_a_gpu_lie_in_tiles() -> None:
    weight = NestedQuantTensor.from_hp(torch.randn(40, 100).cuda(), 32)
    assert type(weight) is TiledQuantTensor
    x = torch.randn(3, 100)
    expected = F.linear(x, weight.cpu())
    assert torch.equal(F.linear(x.cuda(), weight).cpu(), expected)
    buffer = io.BytesIO()
    torch.save(weight.cpu(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True, map_location="cuda")
    assert type(loaded) is NestedQuantTensor
    assert_same(loaded.in_order_of_device(), weight)


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
