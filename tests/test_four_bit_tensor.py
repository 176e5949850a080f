"""``FourBitTensor``: what each view reads, and everything that PyTorch does to it."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from four_bit_tensors import (
    KINDS,
    activations_by_hand,
    assert_same,
    make,
    rotation_by_hand,
    weight_by_hand,
)
from nested_tensors import parts, random
from torch import Tensor, nn

from nestq.four_bit_tensor import FourBitTensor
from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

VIEWS = ("draft", "target")
U = 2.0**-24


def expected_linear(x: Tensor, weight: FourBitTensor, view: str) -> tuple[Tensor, Tensor]:
    """A view's result in float64 by hand, and the sum of its terms' magnitudes."""
    bits = weight.draft_bits if view == "draft" else weight.target_bits
    if bits is None:
        assert weight.dense is not None
        activation, dense = x.double(), weight.dense.double()
    else:
        dense = weight_by_hand(weight)
        activation = x.double() @ rotation_by_hand(weight.in_features, weight.input_rotation)
        if bits != 16:
            codes, scale = activations_by_hand(activation.float(), bits)
            activation = codes.double() * scale.double()
    return activation @ dense.T, activation.abs() @ dense.abs().T


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_its_arithmetic(kind: str, view: str) -> None:
    """Float sums of K products, a rotation of log2(4) + 1 roundings, and of integer layers the
    roundings of scales: K + 8 of each term. Activations are multiples of an eighth, whose rotation
    is exact, so that their codes are those by hand.
    """
    weight = make(kind)
    x = (random(5, 100, seed=1) * 8).round() / 8
    expected, magnitude = expected_linear(x, weight, view)
    with nest_view(view):
        out = F.linear(x, weight)
    assert ((out.double() - expected).abs() <= (100 + 8) * U * magnitude).all()
    assert torch.equal(out, weight.linear(x, None, view))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_it_is_the_weight_that_multiplies_the_input(kind: str) -> None:
    weight = make(kind)
    rotation = rotation_by_hand(100, weight.input_rotation)
    base = weight_by_hand(weight) @ rotation.T
    assert torch.allclose(weight.dequantize("draft", torch.float64), base, rtol=0, atol=1e-12)
    target = base if weight.dense is None else random(24, 100).double()
    assert torch.allclose(weight.dequantize("target", torch.float64), target, rtol=0, atol=1e-12)
    step = weight.scale.double().repeat_interleave(32, dim=1)[:, :100]
    rotated = random(24, 100).double() @ rotation
    # The scale is stored in bfloat16, up to 2^-8 too small for the largest weight of 7 steps.
    assert ((weight_by_hand(weight) - rotated).abs() <= (0.5 + 7 * 2**-8) * step).all()


def test_a_dense_target_is_the_layer_that_was_there() -> None:
    dense, x, bias = random(24, 100), random(33, 100), random(24)
    weight = FourBitTensor.from_hp(dense, 32)
    assert weight.dense is not None
    assert weight.dense.data_ptr() == dense.data_ptr()
    with nest_view("target"):
        assert torch.equal(F.linear(x, weight, bias), F.linear(x, dense, bias))
    assert torch.equal(F.linear(x, weight, bias), F.linear(x, dense, bias))


@pytest.mark.parametrize("kind", ["qspec", "w4a8", "w4a16"])
def test_outside_of_views_it_is_the_target(kind: str) -> None:
    weight, x = make(kind), random(3, 100)
    with nest_view("target"):
        expected = F.linear(x, weight)
    assert torch.equal(F.linear(x, weight), expected)
    with torch.inference_mode():
        assert torch.equal(F.linear(x, weight), expected)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(kind: str, view: str, dtype: torch.dtype) -> None:
    weight, x, bias = make(kind).to(dtype), random(33, 100).to(dtype), random(24).to(dtype)
    with nest_view(view):
        together = F.linear(x, weight, bias)
        for rows in (1, 2, 5, 32):
            alone = torch.cat([F.linear(part, weight, bias) for part in x.split(rows)])
            assert torch.equal(alone, together)
        assert torch.equal(F.linear(x[7], weight, bias), together[7])


def test_eight_bits_are_a_draft_of_a_nested_weight() -> None:
    dense, x = random(24, 100), random(5, 100)
    nested = NestedQuantTensor.from_hp(dense, 32)
    weight = FourBitTensor.from_hp(dense, 32, **KINDS["w4a8"])
    with nest_view("draft"):
        expected = F.linear(x, nested)
    for view in VIEWS:
        with nest_view(view):
            assert torch.equal(F.linear(x, weight), expected)


def test_the_draft_does_not_read_the_dense_weight() -> None:
    weight, x = make(), random(3, 100)
    with nest_view("draft"):
        expected = F.linear(x, weight)
        weight.dense.fill_(torch.nan)
        assert torch.equal(F.linear(x, weight), expected)
        weight.dense = None
        assert torch.equal(F.linear(x, weight), expected)
    for read in (lambda: F.linear(x, weight), weight.dequantize):
        with pytest.raises(RuntimeError, match="the target view needs the dense weight"):
            read()


# What PyTorch does to it.


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
        lambda tensor: tensor.to("cpu", copy=True),
        Tensor.half,
        Tensor.bfloat16,
        Tensor.double,
        lambda tensor: tensor.to("cpu", torch.float16),
        lambda tensor: tensor[0:24],
    ],
)
@pytest.mark.parametrize("kind", ["quantspec", "qspec"])
@pytest.mark.parametrize("inference", [True, False])
def test_contents_survive(
    operation: Callable[[Tensor], Tensor], kind: str, inference: bool
) -> None:
    with torch.inference_mode(inference):
        weight = make(kind)
        if weight.dense is not None:
            weight.dense.copy_(weight.dense.half().bfloat16())  # exact in every dtype
        result = operation(weight)
        assert isinstance(result, FourBitTensor)
        assert result.dense is None or result.dense.dtype == result.dtype == result.hp_dtype
        assert_same(result, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_the_same_weight(kind: str) -> None:
    weight, x = make(kind, rows=40), random(3, 100)
    tiled = weight.tiled()
    assert tiled.unit is not None
    assert_same(tiled.canonical(), weight)
    assert_same(tiled.in_order_of_device(), weight)
    assert weight.in_order_of_device() is weight
    for view in VIEWS:
        assert torch.equal(tiled.dequantize(view), weight.dequantize(view))
        with nest_view(view):
            assert torch.equal(F.linear(x, tiled), F.linear(x, weight))
    assert torch.equal(tiled[16:].dequantize("draft"), weight.dequantize("draft")[16:])
    with pytest.raises(NotImplementedError, match="multiples of 16 only, got rows 3 to 40"):
        tiled[3:]
    other = make(kind, rows=40)
    other.base.zero_()
    assert_same(other.copy_(tiled), weight)


def test_rows_alias_and_other_slices_are_refused() -> None:
    weight = make()
    rows = weight[3:7]
    assert_same(rows, make()[3:7])
    rows.copy_(FourBitTensor.from_hp(torch.zeros(4, 100), 32))
    for part in parts(weight).values():
        assert not part[3:7].any()
        assert part[7:].any()
    for index in ((slice(None), slice(0, 32)), slice(0, 4, 2)):
        with pytest.raises(NotImplementedError, match="along rows"):
            weight[index]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (random(24, 100), "source must be a FourBitTensor, got Tensor"),
        (make("w4a16"), "'target_bits': None.*'target_bits': 16"),
        (make(input_rotation=2), "'input_rotation': 0.*'input_rotation': 2"),
        (make(columns=101), r"\(24, 100\).*\(24, 101\)"),
    ],
)
def test_copy_that_would_change_codes(source: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().copy_(source)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("kind", ["quantspec", "qspec"])
def test_state_dict(kind: str, assign: bool) -> None:
    source, destination = nn.Linear(100, 24), nn.Linear(100, 24).half()
    for linear, seed in ((source, 0), (destination, 1)):
        weight = FourBitTensor.from_hp(random(24, 100, seed=seed), 32, **KINDS[kind])
        linear.weight = nn.Parameter(weight.to(linear.bias.dtype), requires_grad=False)
    state = through_bytes(source.state_dict(), weights_only=True)
    destination.load_state_dict(state, assign=assign, strict=True)
    expected = source.weight if assign else source.half().weight
    assert_same(destination.weight, expected)
    assert isinstance(destination.weight, nn.Parameter)


def test_not_trainable_and_without_storage() -> None:
    weight = make()
    with pytest.raises(ValueError, match="requires_grad must be False: the codes of a FourBit"):
        nn.Parameter(weight)
    with pytest.raises(RuntimeError, match=r"nestq\.save\(model, folder\)$"):
        weight.storage()


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 48}, "group_size must be one of"),
        ({"draft_bits": 3}, r"draft_bits must be one of \(4, 8, 16\), got 3"),
        ({"draft_bits": None}, "draft_bits must be one of"),
        ({"target_bits": 32}, "target_bits must be one of"),
        ({"input_rotation": 3}, "input_rotation must be 0 or a power of two.*100 input"),
        ({"input_rotation": 8}, "that divides the 100 input features, got 8"),
        ({"input_rotation": 1}, "input_rotation must be 0 or a power of two"),
        ({"input_rotation": -4}, "input_rotation must be an int >= 0"),
        ({"scale_dtype": torch.int8}, "scale"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        FourBitTensor.from_hp(random(24, 100), **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dense": random(24, 99)}, r"dense must be torch.float32 of shape \(24, 100\)"),
        ({"dense": random(24, 100).half()}, "dense must be torch.float32.*got torch.float16"),
        ({"dense": random(24, 100).to("meta")}, "on one device"),
        ({"target_bits": 16}, "dense must be None where the target reads the base with 16-bit"),
        ({"base": torch.zeros(24, 63, dtype=torch.uint8)}, "base must be uint8 of shape"),
        ({"hp_dtype": torch.int8}, "hp_dtype must be a floating-point dtype"),
    ],
)
def test_contents_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    weight = make()
    _, attributes = weight.__tensor_flatten__()
    with pytest.raises(ValueError, match=message):
        FourBitTensor(**{**parts(weight), **attributes, **changed})


def test_wrong_input_and_view() -> None:
    with pytest.raises(ValueError, match="input must have 100 features"), nest_view("draft"):
        F.linear(random(2, 99), make())
    with pytest.raises(ValueError, match="view must be 'draft' or 'target', got 'both'"):
        make().dequantize("both")


# Compiled.


@torch.no_grad()
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_views_are_right_and_never_recompile(backend: str) -> None:
    torch.compiler.reset()
    layers = [nn.Linear(100, 100) for _ in KINDS]
    for layer, kind in zip(layers, KINDS, strict=True):
        layer.weight = nn.Parameter(make(kind, rows=100), requires_grad=False)
    block = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for view in VIEWS:
        with nest_view(view):
            compiled(random(2, 100))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, view in enumerate(("draft", "target", "target", "draft")):
            x = random(2, 100, seed=seed)
            with nest_view(view):
                assert torch.equal(compiled(x), block(x))


def test_cached_graphs_are_those_of_the_options() -> None:
    hashes = {make(kind)._stable_hash_for_caching() for kind in KINDS}
    assert len(hashes) == len(KINDS)
    assert make()._stable_hash_for_caching() in hashes
