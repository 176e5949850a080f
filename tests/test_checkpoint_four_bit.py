"""Saving and loading 4-bit weights, KV policies and skipped layers, to the byte."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from four_bit_models import RECIPES, four_bit_weights, logits, quantized
from four_bit_tensors import assert_same
from nested_models import build as build_nested
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from nestq import quantize_, quantspec_w4w16
from nestq.checkpoint import load, read_config, save
from nestq.four_bit_tensor import FourBitTensor
from nestq.hf_quantizer import attach
from nestq.inspection import checkpoint_table
from nestq.kv_policy import default_policy
from nestq.layer_skipping import skip_in_draft_, skipped_in_draft

WEIGHTS = "model.safetensors"
UP = "model.layers.0.mlp.up_proj"


def assert_same_model(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """The same tensors, bit for bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if isinstance(tensor, FourBitTensor):
            assert_same(tensor, theirs[name])
            assert tensor.dtype == theirs[name].dtype
        else:
            assert torch.equal(tensor, theirs[name]), name


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= entries
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(RECIPES))
def test_there_and_back(name: str, tied: bool, tmp_path: Path) -> None:
    model = quantized(name, tied=tied, dtype=torch.bfloat16)
    save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "pretrained")
    for loaded in (
        load(tmp_path / "saved"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained"),
    ):
        assert_same_model(loaded, model)
        assert default_policy(loaded) == default_policy(model)
        for view in ("draft", "target"):
            assert torch.equal(logits(loaded, view), logits(model, view))
    for path in (tmp_path / "pretrained").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    save(loaded, tmp_path / "again")
    again = load_file(tmp_path / "again" / WEIGHTS)
    first = load_file(tmp_path / "saved" / WEIGHTS)
    assert again.keys() == first.keys()
    assert all(torch.equal(tensor, first[key]) for key, tensor in again.items())


@pytest.mark.parametrize("family", ["phi3", "qwen2", "qwen3", "mistral"])
def test_other_families(family: str, tmp_path: Path) -> None:
    for name in ("quantspec", "qspec"):
        model = quantized(name, family)
        save(model, tmp_path / name)
        assert_same_model(load(tmp_path / name), model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtype_is_what_weights_stand_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized("quantspec", dtype=torch.bfloat16)
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved", dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    for name, weight in four_bit_weights(loaded).items():
        assert_same(weight, model.get_submodule(name).weight.to(dtype))
        assert weight.scale_dtype == torch.bfloat16
    assert_same_model(loaded, copy.deepcopy(model).to(dtype))


def test_the_embedding_of_a_tied_head_is_there_once(tmp_path: Path) -> None:
    model = small_models.build("llama-gqa", tied=True)
    with pytest.warns(UserWarning, match="rounded to nearest"):
        quantize_(model, quantspec_w4w16(), progress=False)
    save(model, tmp_path / "saved")
    assert "lm_head.weight.dense" not in load_file(tmp_path / "saved" / WEIGHTS)
    for loaded in (load(tmp_path / "saved"), load(tmp_path / "saved", device="cpu"), model):
        dense = loaded.lm_head.weight.dense
        assert dense.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        loaded.tie_weights()
        assert isinstance(loaded.lm_head.weight, FourBitTensor)
    moved = model.half()  # gives both a place of their own, with the same numbers
    save(moved, tmp_path / "moved")
    assert "lm_head.weight.dense" not in load_file(tmp_path / "moved" / WEIGHTS)
    assert_same_model(load(tmp_path / "moved"), moved)


def test_a_tied_head_that_differs_from_the_embedding_is_stored(tmp_path: Path) -> None:
    model = quantized("quantspec", tied=True)
    model.lm_head.weight.dense = model.lm_head.weight.dense + 1
    save(model, tmp_path / "saved")
    assert_same_model(load(tmp_path / "saved"), model)


@pytest.mark.parametrize("tied", [False, True])
def test_the_draft_alone(tied: bool, tmp_path: Path) -> None:
    model = quantized("quantspec", tied=tied)
    save(model, tmp_path / "saved")
    draft = load(tmp_path / "saved", planes="base")
    assert torch.equal(logits(draft, "draft"), logits(model, "draft"))
    with pytest.raises(RuntimeError, match="the target view needs the dense weight"):
        logits(draft, "target")
    save(draft, tmp_path / "draft")
    assert read_config(tmp_path / "draft").planes == "base"
    assert not [name for name in load_file(tmp_path / "draft" / WEIGHTS) if "dense" in name]
    with pytest.raises(ValueError, match="holds only the base plane"):
        load(tmp_path / "draft")
    assert_same_model(load(tmp_path / "draft", planes="base"), draft)


def test_a_weight_without_a_dense_one_is_complete(tmp_path: Path) -> None:
    model = quantized("qspec")
    save(model, tmp_path / "saved")
    assert read_config(tmp_path / "saved").planes == "both"
    for planes in ("both", "base"):
        assert_same_model(load(tmp_path / "saved", planes=planes), model)


def test_config_on_disk(tmp_path: Path) -> None:
    save(quantized("qspec"), tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert stored["four_bit"] == {
        "draft_bits": 4,
        "target_bits": 16,
        "input_rotation": {f"model.layers.{layer}.mlp.down_proj": 4 for layer in range(2)},
        "tied_head": False,
    }
    assert (stored["kv"], stored["group_size"], stored["overlap"]) == ("16/16", 32, None)
    assert stored["recipe"]["name"] == "qspec_w4"
    assert "skipped" not in stored


# Models that are not quantized, and layers that are skipped.


def test_a_dense_model_with_a_policy(tmp_path: Path) -> None:
    model = small_models.build("llama-gqa", tied=True)
    quantize_(model, quantspec_w4w16(weights=False), progress=False)
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert str(default_policy(loaded)) == "quantspec"
    save(loaded, tmp_path / "again")
    assert read_config(tmp_path / "again").kv == "quantspec"


@pytest.mark.parametrize("kind", ["dense", "nested", "quantspec"])
def test_skipped_layers_are_saved(kind: str, tmp_path: Path) -> None:
    if kind == "dense":
        model = small_models.build("llama-gqa")
    else:
        model = build_nested() if kind == "nested" else quantized(kind)
    skip_in_draft_(model, attention=[0], mlp=[1])
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    assert skipped_in_draft(loaded) == {"attention": [0], "mlp": [1]}
    for view in ("draft", "target"):
        assert torch.equal(logits(loaded, view), logits(model, view))
    assert "attention the draft skips | 0 |" in (tmp_path / "saved" / "README.md").read_text()
    skip_in_draft_(loaded, [], [])
    if kind != "dense":
        save(loaded, tmp_path / "whole")
        assert read_config(tmp_path / "whole").skipped is None


def test_a_model_that_keeps_its_policy() -> None:
    model = quantized("quantspec")
    attach(model, recipe={"name": "another"})
    assert model.config.quantization_config.kv == "quantspec"
    with pytest.raises(ValueError, match="model has no nested weight: quantize it first"):
        attach(small_models.build("llama-gqa"))


# What is refused.


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"four_bit": 5}, "quantization_config: four_bit must be an object or null, got 5"),
        ({"four_bit": {"draft_bits": 16}}, "quantization_config: four_bit: .*target_bits"),
        ({"four_bit": {"draft_bits": 5, "target_bits": 8}}, "four_bit: draft_bits must be one of"),
        (
            {"four_bit": {"draft_bits": 8, "target_bits": 8, "input_rotation": {UP: 3}}},
            "four_bit: input_rotation must be 0 or a power of two",
        ),
        (
            {"four_bit": {"draft_bits": 8, "target_bits": 8, "input_rotation": [4]}},
            "four_bit: input_rotation must be an object",
        ),
        (
            {"four_bit": {"draft_bits": 8, "target_bits": 8, "tied_head": 1}},
            "four_bit: tied_head must be a bool",
        ),
        ({"four_bit": None}, r"overlap must be an int from 1 to 16, got None"),
        ({"kv": "kv3"}, "quantization_config: the KV policy must be"),
        ({"skipped": [1]}, "quantization_config: skipped must be an object"),
        ({"skipped": {"attention": [0], "mlp": [1.5]}}, r"skipped\.mlp.*got 1.5"),
        ({"skipped": {"attention": [7], "mlp": []}}, "layer indices from 0 to 1, got 7"),
        ({"group_size": None}, "group_size must be one of"),
    ],
)
def test_config_that_cannot_be_loaded(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(quantized("quantspec"), tmp_path / "saved")
    change_config(tmp_path / "saved", **entries)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "saved")


@pytest.mark.parametrize("part", ["base", "scale", "dense"])
def test_a_tensor_that_is_missing(part: str, tmp_path: Path) -> None:
    save(quantized("quantspec"), tmp_path / "saved")
    path = tmp_path / "saved" / WEIGHTS
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    del tensors[f"{UP}.weight.{part}"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{UP}\.weight\.{part} is missing"):
        load(tmp_path / "saved")


def test_weights_that_disagree(tmp_path: Path) -> None:
    model = quantized("quantspec")
    other = quantized("w4a8")
    model.get_submodule(UP).weight = other.get_submodule(UP).weight
    with pytest.raises(ValueError, match=r"must agree in \(group_size, draft_bits, target_bits"):
        save(model, tmp_path / "saved")
    model.get_submodule(UP).weight = build_nested().get_submodule(UP).weight
    with pytest.raises(ValueError, match="must be nested, or all of 4 bits, got 1 nested and 14"):
        save(model, tmp_path / "saved")


@pytest.mark.parametrize("name", ["quantspec", "qspec", "w4a8"])
def test_inspection(name: str, tmp_path: Path) -> None:
    from rich.console import Console

    save(quantized(name, tied=True), tmp_path / "saved")
    console = Console(record=True, width=100)
    console.print(checkpoint_table(tmp_path / "saved", read_config(tmp_path / "saved")))
    text = console.export_text()
    assert "groups of 32, format 1" in text
    assert ("dense weights beside them" in text) == (name == "quantspec")
