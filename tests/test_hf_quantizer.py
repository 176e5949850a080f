"""``from_pretrained`` and ``save_pretrained`` of nested models, to the byte."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nested_models
import pytest
import small_models
import torch
from nested_models import RECIPE, REPORT, assert_same_codes, assert_same_model, logits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from nestq.hf_quantizer import NestedConfig, attach, describe, nested_weights
from nestq.tensor import NestedQuantTensor

WEIGHTS = "model.safetensors"
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return nested_models.build()


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def change_config(folder: Path, **entries: Any) -> None:
    """Set entries of the stored quantization_config; an entry of None is removed."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    stored = config["quantization_config"] | entries
    config["quantization_config"] = {k: v for k, v in stored.items() if v is not None}
    path.write_text(json.dumps(config))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# What is on disk.


def test_tensors_on_disk(model: PreTrainedModel, folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    nested = nested_weights(model)
    assert len(nested) == 15
    for name, weight in nested.items():
        for part in ("base", "refinement", "scale"):
            assert torch.equal(stored.pop(f"{name}.weight.{part}"), getattr(weight, part))
    assert stored.keys() == model.state_dict().keys() - {f"{name}.weight" for name in nested}
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_config_on_disk(model: PreTrainedModel, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "nestq",
        "format_version": 1,
        "group_size": 32,
        "overlap": 8,
        "modules": list(nested_weights(model)),
        "planes": "both",
        "recipe": RECIPE,
        "report": REPORT,
    }
    assert config["tie_word_embeddings"] is False


# There and back.


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_every_family_comes_back(family: str, tmp_path: Path) -> None:
    model = nested_models.build(family)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert_same_model(loaded, model)
    for view in ("draft", "target"):
        assert torch.equal(logits(loaded, view), logits(model, view))
    for weight in nested_weights(loaded).values():
        assert isinstance(weight, nn.Parameter)
        assert not weight.requires_grad


def test_saving_and_loading_again_changes_no_byte(folder: Path, tmp_path: Path) -> None:
    for generation in ("second", "third"):
        loaded = load(folder)
        folder = tmp_path / generation
        loaded.save_pretrained(folder)
        for path in (tmp_path / "saved").iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_what_weights_stand_for(
    model: PreTrainedModel, folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    loaded = load(folder, dtype=dtype)
    assert_same_codes(loaded, model)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert {weight.scale.dtype for weight in nested_weights(loaded).values()} == {torch.bfloat16}
    loaded.save_pretrained(tmp_path / "cast")
    assert_same_codes(load(tmp_path / "cast"), model)
    assert load(tmp_path / "cast").dtype == dtype


def test_scales_may_be_wider_than_the_model(tmp_path: Path) -> None:
    model = small_models.build("llama-gqa")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = NestedQuantTensor.from_hp(module.weight, scale_dtype=torch.float32)
            module.weight = nn.Parameter(weight, requires_grad=False)
    attach(model)
    model.save_pretrained(tmp_path)
    assert_same_codes(load(tmp_path, dtype=torch.bfloat16), model)


def test_shards(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same_model(load(tmp_path), model)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(OSError, match="model-00002"):
        load(tmp_path)


def test_generation_config(tmp_path: Path) -> None:
    model = nested_models.build()
    model.generation_config.update(do_sample=True, temperature=0.3, eos_token_id=[5, 7])
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path).generation_config
    assert (loaded.do_sample, loaded.temperature, loaded.eos_token_id) == (True, 0.3, [5, 7])


def test_nested_head_is_never_tied_again(tmp_path: Path) -> None:
    model = nested_models.build(tied=True)
    head = model.lm_head.weight
    model.tie_weights()
    assert model.lm_head.weight is head
    assert not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    loaded.tie_weights()
    assert_same_model(loaded, model)
    assert not isinstance(loaded.model.embed_tokens.weight, NestedQuantTensor)


@pytest.mark.parametrize("tied", [True, False])
def test_dense_head_stays_as_it_is(tmp_path: Path, tied: bool) -> None:
    model = nested_models.build(tied=tied, head=False)
    assert model.config.tie_word_embeddings is tied
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) is not tied
    loaded = load(tmp_path)
    assert_same_model(loaded, model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


def test_config_says_what_the_model_holds_when_it_is_saved(
    model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    loaded = load(folder)
    up = loaded.get_submodule(UP)
    up.weight = nn.Parameter(up.weight.dequantize())
    loaded.save_pretrained(tmp_path / "mixed")
    again = load(tmp_path / "mixed")
    assert_same_model(again, loaded)
    assert UP not in nested_weights(again)


# How it is loaded.


class LargeFloats(TorchDispatchMode):
    """Shapes of all dense floating-point tensors that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if type(tensor) is Tensor and tensor.is_floating_point() and not tensor.is_meta:
                self.shapes.add(tuple(tensor.shape))
        return out


def test_loading_never_holds_a_dense_nested_weight(
    model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a mode sees its own thread only
    with LargeFloats() as seen:
        load(folder, dtype=torch.float32)
    assert (48,) in seen.shapes  # it does see the norms
    nested = {tuple(weight.shape) for weight in nested_weights(model).values()}
    embedding = {tuple(model.model.embed_tokens.weight.shape)}
    assert not seen.shapes & (nested - embedding)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_planes_are_memory_mapped(folder: Path) -> None:
    loaded = load(folder)
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(folder / WEIGHTS))
    ]
    for weight in nested_weights(loaded).values():
        for plane in (weight.base, weight.refinement, weight.scale):
            assert any(start <= plane.data_ptr() < end for start, end in spans)


def test_sizes_that_transformers_plans_with(folder: Path) -> None:
    loaded = load(folder)
    weight = loaded.get_submodule(UP).weight
    stored = sum(plane.nbytes for plane in (weight.base, weight.refinement, weight.scale))
    size = loaded.hf_quantizer.param_element_size(loaded, f"{UP}.weight", weight)
    assert size * weight.numel() == stored
    norm = loaded.model.norm.weight
    assert loaded.hf_quantizer.param_element_size(loaded, "model.norm.weight", norm) == 2


def test_device_map(model: PreTrainedModel, folder: Path) -> None:
    pytest.importorskip("accelerate")
    assert_same_model(load(folder, device_map="cpu"), model)


# What users do to a model.


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(
    "operation",
    [
        lambda model: model.half(),
        lambda model: model.float(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("cpu"),
        lambda model: model.half().to(torch.bfloat16),
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
)
def test_codes_survive(
    folder: Path,
    tmp_path: Path,
    operation: Callable[[PreTrainedModel], PreTrainedModel],
    loaded: bool,
) -> None:
    model = nested_models.build()
    result = operation(load(folder) if loaded else copy.deepcopy(model))
    assert_same_codes(result, model)
    assert {parameter.dtype for parameter in result.parameters()} == {result.dtype}
    result.save_pretrained(tmp_path / "after")
    assert_same_codes(load(tmp_path / "after"), model)
    assert logits(result, "target").dtype == result.dtype


@pytest.mark.parametrize("assign", [True, False])
def test_state_dict(model: PreTrainedModel, tmp_path: Path, assign: bool) -> None:
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = nested_models.build(seed=1)
    other.load_state_dict(state, strict=True, assign=assign)
    assert_same_model(other, model)


def test_not_trainable(folder: Path) -> None:
    loaded = load(folder)
    assert not loaded.hf_quantizer.is_trainable
    with pytest.raises(ValueError, match="requires_grad must be False"):
        loaded.requires_grad_(True)


# Refusals.


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"format_version": 2}, r"format_version must be 1, got 2.*newer"),
        ({"format_version": None}, "format_version must be 1, got None"),
        ({"group_size": 64}, rf"saved/{WEIGHTS}: tensor .* groups of 64"),
        ({"group_size": 48}, r"quantization_config: group_size must be one of"),
        ({"group_size": 32.0}, r"quantization_config: group_size must be one of"),
        ({"group_size": None}, r"quantization_config: .*'group_size'"),
        ({"overlap": 17}, "quantization_config: overlap must be"),
        ({"planes": "draft"}, "quantization_config: planes must be one of"),
        ({"unheard_of": 1}, "quantization_config: .*'unheard_of'"),
        ({"modules": 5}, "quantization_config: modules must be a list of names, got 5"),
        ({"report": 5}, "quantization_config: report must be an object or null, got 5"),
        ({"modules": [UP]}, "belongs to no module that quantization_config lists"),
        (
            {"modules": ["model.layers.9.mlp.up_proj"]},
            r"modules lists 'model.layers.9.mlp.up_proj'",
        ),
        ({"modules": ["model.norm"]}, "which is no linear layer of LlamaForCausalLM"),
    ],
)
def test_config_that_cannot_be_loaded(folder: Path, entries: dict[str, Any], message: str) -> None:
    change_config(folder, **entries)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{UP}.weight.base"),
            rf"saved/{WEIGHTS}: tensor {UP}.weight.base is miss",
        ),
        (lambda t: t.pop(f"{UP}.weight.refinement"), f"{UP}.weight.refinement is missing"),
        (lambda t: t.pop(f"{UP}.weight.scale"), f"{UP}.weight.scale is missing"),
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (
            lambda t: t.update({"extra": t.pop("model.norm.weight")}),
            r"tensor model\.norm\.weight is missing",
        ),
        (
            lambda t: t[f"{UP}.weight.scale"][3].fill_(torch.nan),
            rf"saved/{WEIGHTS}: tensor {UP}.weight.scale must be finite",
        ),
        (
            lambda t: t.update({f"{UP}.weight.base": t[f"{UP}.weight.base"][:-1].clone()}),
            r"must be U8 of shape \(100, 32\).*100 x 48.*found U8 of shape \(99, 32\)",
        ),
        (
            lambda t: t.update({f"{UP}.weight.base": t[f"{UP}.weight.base"].view(torch.int8)}),
            r"must be U8 .*found I8",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model\.norm\.weight must be of shape \(48,\), found \(3,\)",
        ),
    ],
)
def test_weights_that_cannot_be_loaded(
    folder: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    change_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_truncated_file(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"saved/{WEIGHTS}: not a complete safetensors file"):
        load(folder)


def test_from_pretrained_does_not_quantize(tmp_path: Path) -> None:
    dense = small_models.build("llama-gqa")
    dense.save_pretrained(tmp_path)
    config = describe(nested_models.nest_(dense))
    with pytest.raises(ValueError, match="does require the model to be pre-quantized"):
        load(tmp_path, quantization_config=config)


def test_attach_refuses() -> None:
    dense = small_models.build("llama-gqa")
    with pytest.raises(ValueError, match="model has no nested weight"):
        attach(dense)
    model = nested_models.nest_(dense)
    for name in ("recipe", "report"):
        with pytest.raises(ValueError, match=f"{name} must be JSON"):
            attach(model, **{name: {"dtype": torch.float16}})
    weight = NestedQuantTensor.from_hp(torch.randn(100, 48), 64, 8)
    model.get_submodule(UP).weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"must agree.*\(32, 8, True\), \(64, 8, True\)"):
        attach(model)


def test_config_is_shown() -> None:
    assert '"group_size": 32' in repr(describe(nested_models.nest_(small_models.build("phi3"))))
    assert NestedConfig.from_dict(describe(nested_models.build()).to_dict()).overlap == 8
