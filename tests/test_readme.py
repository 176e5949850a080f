"""The README's Python, run from top to bottom on a small model that samples by default."""

import re
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

README = Path(__file__).resolve().parents[1] / "README.md"


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token a word: "5" is token 5."""
    words = Tokenizer(WordLevel({str(n): n for n in range(vocabulary)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0")


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 3
    model = small_models.build("llama-gqa")
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "tokenizer": word_tokenizer(model.config.vocab_size),
        "texts": [" ".join(map(str, range(3, 97)))] * 3,
        "prompt": "5 6 7 8",
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", lambda module: module)  # has tests of its own
    for block in blocks:
        exec(block, names)

    assert names["out"].shape[1] > 4
    assert (tmp_path / "my-nested-model" / "model.safetensors").is_file()
