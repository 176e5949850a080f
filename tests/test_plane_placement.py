"""Planes of linears that read one input lie side by side, and nothing else changes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import four_bit_models
import pytest
import small_models
import torch
from nested_models import assert_same_codes, assert_same_model, build, logits, nest_
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import nestq
from nestq.architectures import describe
from nestq.plane_placement import merged, place_side_by_side_
from nestq.tensor import NestedQuantTensor
from nestq.tiled_tensor import TiledQuantTensor


def groups(model: PreTrainedModel) -> Iterator[list[nn.Linear]]:
    """Linears of more than one that read one input."""
    architecture = describe(model)
    for index in range(len(architecture.layers)):
        for names in architecture.linear_groups:
            if len(names) > 1:
                yield [architecture.linear(index, name) for name in names]


def planes_of(linears: list[nn.Linear]) -> dict[str, list[Tensor]]:
    weights: list[Any] = [linear.weight for linear in linears]
    names = weights[0].__tensor_flatten__()[0]
    planes = {name: [getattr(weight, name) for weight in weights] for name in names}
    if linears[0].bias is not None:
        planes["bias"] = [linear.bias.detach() for linear in linears]
    return planes


def are_side_by_side(linears: list[nn.Linear]) -> bool:
    found = {merged(planes) is not None for planes in planes_of(linears).values()}
    assert len(found) == 1
    return found.pop()


def in_tiles_(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = TiledQuantTensor.from_canonical(module.weight)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def storages(model: PreTrainedModel) -> dict[int, int]:
    """Bytes of each storage of planes and biases."""
    found = {}
    for linears in groups(model):
        for planes in planes_of(linears).values():
            for plane in planes:
                storage = plane.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen2", "gemma2"])
def test_planes_lie_side_by_side_with_the_same_bytes(family: str, tiles: bool) -> None:
    # Rows of gate and up: a multiple of 16.
    model = build(family, num_hidden_layers=2, intermediate_size=96)
    if tiles:
        in_tiles_(model)
    before = copy.deepcopy(model)
    parameters = {name: id(one) for name, one in model.named_parameters()}
    assert not any(are_side_by_side(linears) for linears in groups(model))
    bytes_before = sum(storages(model).values())

    assert place_side_by_side_(model) == 4
    assert all(are_side_by_side(linears) for linears in groups(model))
    assert {name: id(one) for name, one in model.named_parameters()} == parameters
    kinds = sum(len(planes_of(linears)) for linears in groups(model))
    assert len(storages(model)) == kinds
    assert sum(storages(model).values()) == bytes_before
    for ours, theirs in zip(groups(model), groups(before), strict=True):
        for name, planes in planes_of(ours).items():
            assert all(map(torch.equal, planes, planes_of(theirs)[name])), name

    places = storages(model)
    assert place_side_by_side_(model) == 0
    assert storages(model) == places


def test_it_computes_the_same() -> None:
    model = build("qwen2")
    expected = {view: logits(model, view) for view in ("draft", "target")}
    place_side_by_side_(model)
    for view, one in expected.items():
        assert torch.equal(logits(model, view), one)


def test_old_planes_are_freed_one_kind_at_a_time() -> None:
    model = build("llama-gqa", num_hidden_layers=4)
    old = [
        StorageWeakRef(plane.untyped_storage())
        for linears in groups(model)
        for planes in planes_of(linears).values()
        for plane in planes
    ]
    alive = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.cat.default:
                alive.append(sum(not one.expired() for one in old))
            return func(*args, **(kwargs or {}))

    total = len(old)
    with Watch():
        place_side_by_side_(model)
    # Three kinds of planes of three linears, then of two, for each layer.
    steps = [3, 3, 3, 2, 2, 2] * 4
    assert alive == [total - sum(steps[:i]) for i in range(len(steps))]
    assert all(one.expired() for one in old)


def test_copies_and_files_are_whole(tmp_path: Path) -> None:
    model = build("qwen2")
    before = copy.deepcopy(model)
    place_side_by_side_(model)
    assert_same_model(copy.deepcopy(model), before)
    assert_same_model(model.to("cpu"), before)

    nestq.save(model, tmp_path / "saved")
    nestq.save(before, tmp_path / "before")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("saved", "before")]
    assert sizes[0] == sizes[1]
    loaded = nestq.load(tmp_path / "saved")
    assert_same_codes(loaded, before)
    assert place_side_by_side_(loaded) == 4

    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = build("qwen2", seed=1)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same_model(other, before)
    # Loading writes into the planes where they are.
    place_side_by_side_(other)
    other.load_state_dict(model.state_dict())
    assert all(are_side_by_side(linears) for linears in groups(other))


def test_a_moved_model_can_be_placed_again() -> None:
    model = build("llama-gqa")
    place_side_by_side_(model)
    model.half()  # makes new planes
    assert not any(are_side_by_side(linears) for linears in groups(model))
    assert place_side_by_side_(model) == 4
    assert all(are_side_by_side(linears) for linears in groups(model))


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = build("qwen2")
    place_side_by_side_(model)
    weight: Any = model.model.layers[0].self_attn.q_proj.weight
    assert weight.base.is_inference()
    normal = build("qwen2")
    with torch.inference_mode():
        place_side_by_side_(normal)
    normal.load_state_dict(build("qwen2", seed=1).state_dict())  # writes every plane
    assert not next(groups(normal))[0].weight.base.is_inference()


def test_what_no_kernel_can_read_at_once_is_left_alone() -> None:
    def first_group(model: PreTrainedModel) -> list[nn.Linear]:
        return next(groups(model))

    def replace(linear: nn.Linear, **options: int) -> None:
        dense = linear.weight.dequantize()
        options = {"group_size": 32, "overlap": 8, **options}
        linear.weight = nn.Parameter(NestedQuantTensor.from_hp(dense, **options), False)

    model = build("llama-gqa", num_hidden_layers=1)
    key = first_group(model)[1]
    nested = key.weight
    replace(key, overlap=16)
    assert place_side_by_side_(model) == 1  # gate and up
    replace(key, group_size=64)
    assert place_side_by_side_(model) == 0
    key.weight = nn.Parameter(nested.dequantize(), False)
    assert place_side_by_side_(model) == 0
    key.weight = first_group(model)[2].weight
    assert place_side_by_side_(model) == 0
    key.weight = nested
    key.bias = nn.Parameter(torch.zeros(key.out_features), False)
    assert place_side_by_side_(model) == 0
    key.bias = None
    weight: Any = key.weight
    refinement, weight.refinement = weight.refinement, None
    assert place_side_by_side_(model) == 0
    weight.refinement = refinement
    assert not are_side_by_side(first_group(model))
    assert place_side_by_side_(model) == 1
    assert are_side_by_side(first_group(model))


def test_a_weight_of_two_layers_stays_where_it_is() -> None:
    model = build("llama-gqa")
    one, other = (layer.self_attn for layer in model.model.layers)
    other.k_proj.weight = one.k_proj.weight
    assert place_side_by_side_(model) == 3
    assert place_side_by_side_(model) == 0


def test_tiles_with_rows_of_two_weights_are_left_alone() -> None:
    model = in_tiles_(build("llama-gqa", num_hidden_layers=1, intermediate_size=100))
    assert place_side_by_side_(model) == 1
    attention, mlp = groups(model)
    assert are_side_by_side(attention)
    assert not are_side_by_side(mlp)


def test_models_with_nothing_to_place() -> None:
    assert place_side_by_side_(build("phi3")) == 0
    assert place_side_by_side_(small_models.build("llama-gqa")) == 0
    assert place_side_by_side_(nn.Linear(3, 3)) == 0
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        place_side_by_side_(3)  # type: ignore[arg-type]


def test_a_compiled_model_is_placed() -> None:
    model = nest_(small_models.build("llama-gqa"))
    assert place_side_by_side_(torch.compile(model)) == 4
    assert all(are_side_by_side(linears) for linears in groups(model))


@pytest.mark.parametrize(("name", "moved"), [("w4a8", 4), ("quantspec", 0), ("qspec", 0)])
def test_weights_of_4_bits_move_where_their_activations_are_int8(name: str, moved: int) -> None:
    model = four_bit_models.quantized(name)
    expected = four_bit_models.logits(model, "draft")
    assert place_side_by_side_(model) == moved
    assert place_side_by_side_(model) == 0
    assert torch.equal(four_bit_models.logits(model, "draft"), expected)
