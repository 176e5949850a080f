"""``nestq.save`` is all or nothing; ``nestq.load`` loads both planes, or the base alone."""

import json
import os
from pathlib import Path
from typing import Any

import nested_models
import pytest
import small_models
import torch
import transformers
from nested_models import assert_same_codes, assert_same_model, logits
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nestq.checkpoint import check_target, load, read_config, save
from nestq.hf_quantizer import nested_weights
from nestq.view import nest_view

WEIGHTS = "model.safetensors"
PARTS = ("base", "refinement", "scale")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return nested_models.build()


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    save(model, tmp_path / "model")
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


# Saving.


def test_saved_and_loaded(model: PreTrainedModel, folder: Path) -> None:
    loaded = load(folder)
    assert_same_model(loaded, model)
    for view in ("draft", "target"):
        assert torch.equal(logits(loaded, view), logits(model, view))
    assert not loaded.training


def test_same_tensors_as_save_pretrained(
    model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "other")
    assert contents(folder).keys() - contents(tmp_path / "other").keys() == {"README.md"}
    for name, content in contents(tmp_path / "other").items():
        assert contents(folder)[name] == content


def test_readme_says_the_import_first(model: PreTrainedModel, folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert card.startswith("`import nestq` must come before loading this model")
    weights = nested_weights(model).values()
    assert f"| base planes | {sum(weight.base.nbytes for weight in weights)} bytes |" in card
    assert "LlamaForCausalLM" in card


def test_only_the_folder_is_left(model: PreTrainedModel, tmp_path: Path) -> None:
    save(model, tmp_path / "new" / "parents" / "model")
    save(model, tmp_path / "new" / "parents" / "model")
    assert os.listdir(tmp_path / "new" / "parents") == ["model"]
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "new" / "parents" / "model").stat().st_mode == plain.stat().st_mode


def test_tokenizer_and_shards(model: PreTrainedModel, tmp_path: Path) -> None:
    save(model, tmp_path / "model", tiny_tokenizer(), max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("a")["input_ids"] == [1]
    assert_same_model(load(tmp_path / "model"), model)


def test_model_that_was_nested_elsewhere(tmp_path: Path) -> None:
    """For example by ``torchao.quantization.quantize_``, which sees modules only."""
    model = nested_models.nest_(small_models.build("qwen2", tied=False))
    with pytest.raises(RuntimeError, match=r"nestq\.save\(model, folder\)$"):
        model.save_pretrained(tmp_path / "plain")
    save(model, tmp_path / "model")
    assert_same_model(load(tmp_path / "model"), model)


def test_compiled_model(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    save(torch.compile(model), tmp_path / "compiled")
    assert contents(tmp_path / "compiled") == contents(folder)


def test_replaces_a_checkpoint_as_a_whole(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("of the old one")
    other = nested_models.build("qwen3", seed=1)
    save(other, folder)
    assert not (folder / "chat_template.jinja").exists()
    assert_same_model(load(folder), other)


def test_onto_the_folder_that_is_mapped(model: PreTrainedModel, folder: Path) -> None:
    loaded = load(folder)
    save(loaded, folder)
    assert_same_model(loaded, model)
    assert_same_model(load(folder), model)


def test_through_a_link(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    save(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same_model(load(tmp_path / "link"), model)


@pytest.mark.parametrize("step", ["save_pretrained", "tokenizer", "rename"])
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_failure_leaves_what_was_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    exists: bool,
    error: BaseException,
) -> None:
    target, model = tmp_path / "model", nested_models.build()
    if exists:
        save(model, target)
    before = contents(target) if exists else None

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    tokenizer = tiny_tokenizer()
    if step == "tokenizer":
        monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    elif step == "save_pretrained":
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    else:
        rename = Path.rename
        monkeypatch.setattr(
            Path,
            "rename",
            lambda self, to: fail() if self.suffix == ".unfinished" else rename(self, to),
        )
    with pytest.raises(type(error)):
        save(nested_models.build(seed=1), target, tokenizer)
    assert os.listdir(tmp_path) == (["model"] if exists else [])
    if exists:
        assert contents(target) == before


def test_refuses_to_replace_anything_else(model: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(FileExistsError, match="folder is a file"):
        save(model, file)
    with pytest.raises(FileExistsError, match=r"not ours: .*there is no config.json"):
        save(model, tmp_path)
    small_models.build("llama-gqa").save_pretrained(tmp_path / "dense")
    with pytest.raises(FileExistsError, match=r"not ours: .*not a nestq checkpoint"):
        save(model, tmp_path / "dense")
    assert file.read_text() == "precious"
    (tmp_path / "empty").mkdir()
    save(model, tmp_path / "empty")
    (tmp_path / "empty" / ".git").mkdir()
    with pytest.raises(FileExistsError, match="has folders in it"):
        save(model, tmp_path / "empty")


def test_refuses_to_delete_files_that_it_would_not_write(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    target, tokenizer = tmp_path / "model", tiny_tokenizer()
    tokenizer.chat_template = {"default": "for all", "tools": "for tools"}  # one has a folder
    for _ in range(2):
        save(model, target, tokenizer, max_shard_size="20KB")
    (template,) = (target / "additional_chat_templates").iterdir()
    assert template.read_text() == "for tools"
    for name in ("notes.txt", "model.safetensors.bak", f"{template.parent.name}/notes.txt"):
        (target / name).write_text("precious")
    message = r"delete: additional_\w+/notes\.txt, model\.safetensors\.bak, notes\.txt$"
    with pytest.raises(FileExistsError, match=message):
        save(model, target)
    assert (target / "notes.txt").read_text() == "precious"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_refuses_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    for target in ("/proc/model", "/proc/new/parents/model"):
        with pytest.raises(OSError, match=r"^/proc: nothing can be written here"):
            check_target(Path(target))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file: nothing can be written here"):
        check_target(tmp_path / "file" / "model")
    check_target(tmp_path / "new" / "parents" / "model")
    assert os.listdir(tmp_path) == ["file"]


def test_a_refused_target_leaves_the_model(tmp_path: Path) -> None:
    model = nested_models.nest_(small_models.build("llama-gqa", tied=True))
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="folder is a file"):
        save(model, tmp_path / "file")
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    assert model.config.tie_word_embeddings


def test_refuses_arguments_of_other_kinds(model: PreTrainedModel, tmp_path: Path) -> None:
    for given in (None, "folder"):
        with pytest.raises(TypeError, match=r"^model must be .* got (NoneType|str)$"):
            save(given, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^tokenizer must be .* got str$"):
        save(model, tmp_path / "model", "tokenizer")
    assert os.listdir(tmp_path) == []


def test_refuses_a_model_that_is_not_nested(tmp_path: Path) -> None:
    dense = small_models.build("llama-gqa")
    with pytest.raises(ValueError, match="no nested weight"):
        save(dense, tmp_path / "model")
    dense.hf_quantizer = object()
    with pytest.raises(ValueError, match="quantized by object, not by nestq"):
        save(dense, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_parts_that_are_compiled_cannot_be_saved(tmp_path: Path) -> None:
    model = nested_models.build()
    model.model.layers[0] = torch.compile(model.model.layers[0])
    message = r"model: model\.layers\.0\._orig_mod\.\S+ is in a part that torch\.compile wrapped"
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        save(model, tmp_path / "model")


# Loading.


def test_dtype_and_device(model: PreTrainedModel, folder: Path) -> None:
    assert load(folder).dtype == torch.bfloat16
    loaded = load(folder, dtype=torch.float32, device="cpu")
    assert loaded.dtype == torch.float32
    assert_same_codes(loaded, model)
    on_meta = load(folder, device="meta")
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}


def test_base_alone_is_the_draft(model: PreTrainedModel, folder: Path) -> None:
    draft = load(folder, planes="base")
    assert torch.equal(logits(draft, "draft"), logits(model, "draft"))
    for name, weight in nested_weights(draft).items():
        whole = model.get_submodule(name).weight
        assert weight.refinement is None
        assert torch.equal(weight.base, whole.base)
        assert torch.equal(weight.scale, whole.scale)
    with pytest.raises(RuntimeError, match="only the base plane is loaded"):
        logits(draft, "target")
    with pytest.raises(RuntimeError, match="only the base plane is loaded"):
        draft(small_models.tokens(draft))
    with nest_view("draft"):
        out = draft.generate(small_models.tokens(draft), max_new_tokens=3, do_sample=False)
        assert out.shape == (2, 27)


def test_base_alone_reads_no_refinement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: dict[str, int] = {}

    class Recorder:
        """A slice of a file that tells when its bytes are asked for."""

        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, index: Any) -> torch.Tensor:
            tensor = self.inner[index]
            read[self.name] = tensor.nbytes
            return tensor

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.inner, attribute)

    class RecordingFile:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def keys(self) -> Any:
            return self.file.keys()

        def get_slice(self, name: str) -> Recorder:
            return Recorder(name, self.file.get_slice(name))

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

    monkeypatch.setattr("transformers.modeling_utils.safe_open", RecordingFile)
    sizes = {}
    for planes in ("both", "base"):
        read.clear()
        model = load(folder, planes=planes)
        names = {f"{name}.weight.{part}" for name in nested_weights(model) for part in PARTS}
        sizes[planes] = sum(size for name, size in read.items() if name in names)
        assert any(name.endswith(".refinement") for name in read) == (planes == "both")
    # Of group 32 with 16-bit scales: 4.5 and 8.5 bits a weight.
    assert sizes["base"] / sizes["both"] == 4.5 / 8.5
    assert "UNEXPECTED" not in caplog.text


def test_base_alone_can_be_saved(folder: Path, tmp_path: Path) -> None:
    draft = load(folder, planes="base")
    save(draft, tmp_path / "draft")
    stored = load_file(tmp_path / "draft" / WEIGHTS)
    assert not any(name.endswith(".refinement") for name in stored)
    assert read_config(tmp_path / "draft").planes == "base"
    assert "| planes | base only |" in (tmp_path / "draft" / "README.md").read_text()
    assert_same_model(load(tmp_path / "draft", planes="base"), draft)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert_same_model(plain, draft)
    with pytest.raises(ValueError, match=r"holds only the base plane: load it with planes='base'"):
        load(tmp_path / "draft")


def test_a_device_that_is_not_there_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device 'nowhere' cannot be used"):
        load(tmp_path / "nowhere", device="nowhere")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"a": 5}}'])
def test_an_index_that_is_damaged(model: PreTrainedModel, tmp_path: Path, index: str) -> None:
    save(model, tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / f"{WEIGHTS}.index.json").write_text(index)
    with pytest.raises(ValueError, match=rf"{WEIGHTS}\.index\.json: not an index of safetensors"):
        load(tmp_path / "model")


@pytest.mark.parametrize("planes", ["both", "base"])
def test_damage_is_found(folder: Path, planes: Any) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"model/{WEIGHTS}: not a complete safetensors file"):
        load(folder, planes=planes)


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
        load(tmp_path)
    small_models.build("llama-gqa").save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"dense/config.json: not a nestq checkpoint: .* None"):
        load(tmp_path / "dense")
    with pytest.raises(ValueError, match="planes must be one of"):
        load(tmp_path / "dense", planes="target")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json: Expecting property name"),
        ("[]", r"config\.json: "),
        ('{"quantization_config": {"quant_method": "gptq"}}', "quant_method is 'gptq'"),
        (
            '{"quantization_config": {"quant_method": "nestq", "format_version": 7}}',
            r"model/config\.json: quantization_config\.format_version must be 1, got 7",
        ),
    ],
)
def test_config_that_cannot_be_read(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_config_keeps_recipe_and_report(folder: Path) -> None:
    stored = read_config(folder)
    assert stored.recipe == nested_models.RECIPE
    assert stored.report == nested_models.REPORT
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
