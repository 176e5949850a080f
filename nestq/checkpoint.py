"""Save and load nested models as folders that transformers understands."""

import json
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nestq.architectures import unwrap
from nestq.argument_checks import check_type, existing_device
from nestq.checkpoint_format import METHOD, Planes, check_planes_option
from nestq.hf_quantizer import (
    NestedConfig,
    NestedQuantizer,
    attach,
    quantized_weights,
    share_tied_head_,
)

# Where tokenizers with several chat templates have those that are not the default.
TEMPLATES = "additional_chat_templates"
# Names of the files that transformers, its tokenizers and `save` write into a checkpoint.
WRITTEN = re.compile(
    r"README\.md|(config|generation_config|processor_config|preprocessor_config)\.json"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    rf"|(chat_template|{TEMPLATES}/[^/]+)\.jinja"
    r"|(merges|vocab)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)

CARD = """\
`import nestq` must come before loading this model: without it transformers does not know the
format, and fills the weights with random numbers.

```python
import nestq
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("<this folder>")  # draft and target
{draft_alone}```

Written by nestq. {meaning}

| | |
|---|---|
{table}
"""
DRAFT_ALONE = 'draft = nestq.load("<this folder>", planes="base")  # the draft alone\n'
NESTED = (
    "Every nested weight is a 4-bit base plane, which is the draft, and a 4-bit\n"
    "refinement plane, which added to the base makes the 8-bit target."
)
FOUR_BIT = (
    "Every quantized weight is a 4-bit base plane, which the draft reads with {draft_bits}-bit\n"
    "activations. The target reads {target}."
)
PART_NAMES = {
    "base": "base planes",
    "refinement": "refinement planes",
    "dense": "dense weights beside them",
    "scale": "scales",
}
DENSE = "No weight is quantized."


def save(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """Save a quantized model, with a README, so that the folder is complete or does not exist.

    Everything is written into a temporary folder beside it, flushed to the disk, and renamed. A
    nestq checkpoint that is there already is replaced as a whole, once the new one is complete.
    ``model.save_pretrained`` writes the same tensors, but in place, and cannot save a model that
    ``torchao.quantization.quantize_`` nested; this can.

    Args:
        model: a model with quantized weights, or whose draft skips layers.
        folder: where to; its parents are created.
        tokenizer: saved into the folder too, if given.
        max_shard_size: of a safetensors file, as ``save_pretrained`` takes it.

    Raises:
        TypeError: the model is none of transformers, or the tokenizer cannot be saved.
        ValueError: no weight is quantized and no layer skipped, or the model was quantized by
            another method.
        OSError: as :func:`check_target`.
    """
    model = check_type("model", unwrap(model), PreTrainedModel, "a transformers PreTrainedModel")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(
            f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}"
        )
    target = Path(folder).resolve()
    check_target(target)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        attach(model)
    elif not isinstance(quantizer, NestedQuantizer):
        raise ValueError(f"model is quantized by {type(quantizer).__name__}, not by nestq")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid4().hex}.unfinished")
    try:
        unfinished.mkdir()
        # Tensors are found by the names of their modules, also where a model's own checkpoints have
        # others, as those of multimodal models do.
        model.save_pretrained(unfinished, max_shard_size=max_shard_size, save_original_format=False)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(_card(model), encoding="utf-8")
        for path in [*unfinished.rglob("*"), unfinished]:
            _sync(path)
        _replace(target, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load(
    folder: str | os.PathLike[str],
    planes: Planes = "both",
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal language model that :func:`save` wrote; the files are memory-mapped.

    Args:
        folder: a checkpoint that :func:`save` or ``save_pretrained`` wrote.
        planes: ``"both"``, or ``"base"`` for the draft alone: refinement planes are not read, nor
            dense weights beside 4-bit ones, and the target view raises an error.
        dtype: of the dense weights, and what quantized ones stand for; default: as saved.
        device: where the model goes; default: the CPU.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing in it.
        ValueError: the folder is no nestq checkpoint, of an unknown format, damaged, or has no
            refinement where both planes are asked for; or the device is not there.
    """
    check_planes_option(planes)
    if device is not None:
        existing_device(device)
    folder = Path(folder)
    stored = read_config(folder)
    if planes == "both" and stored.planes == "base":
        raise ValueError(
            f"{folder}: the checkpoint holds only the base plane: load it with planes='base'"
        )
    weight_files(folder)  # refuses a damaged index by name
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["planes"] = planes
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype or "auto")
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
        share_tied_head_(model, model.config.quantization_config)
    return model


def read_config(folder: str | os.PathLike[str]) -> NestedConfig:
    """The ``quantization_config`` of a checkpoint.

    Raises:
        NotADirectoryError: it is a file.
        FileNotFoundError, ValueError: as :func:`load`.
    """
    path = Path(folder) / "config.json"
    if Path(folder).is_file():
        raise NotADirectoryError(f"{folder}: a file, expected the folder of a checkpoint")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder")
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: not a checkpoint, there is no config.json")
    try:
        stored = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
        method = stored.get("quant_method")
        if method != METHOD:
            raise ValueError(f"not a nestq checkpoint: quant_method is {method!r}, not {METHOD!r}")
        return NestedConfig.from_dict(stored)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that its index names.

    Raises:
        FileNotFoundError: one of them is missing.
        ValueError: the index is damaged.
    """
    folder = Path(folder)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = {SAFE_WEIGHTS_NAME}
    if index.is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
        try:
            stored = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {os.fspath(name) for name in stored.values()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index}: not an index of safetensors files: {error!r}") from error
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: the weight file {name} is missing")
    return [folder / name for name in sorted(names)]


def check_target(target: Path) -> None:
    """Refuse a folder that :func:`save` would refuse: ask before long work, not after it.

    Raises:
        FileExistsError: target is a file, or holds something other than a nestq checkpoint.
        OSError: nothing can be written where target is to be.
    """
    target = target.resolve()
    check_writable(target.parent)
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target}: folder is a file")
    entries = list(target.iterdir())
    if not entries:
        return
    templates = target / TEMPLATES
    folders = [entry for entry in entries if entry.is_dir()]
    if any(folder != templates for folder in folders):
        raise FileExistsError(
            f"{target}: folder has folders in it, which replacing a checkpoint would delete"
        )
    try:
        read_config(target)
    except (FileNotFoundError, ValueError) as error:
        raise FileExistsError(f"{target}: folder is not empty and not ours: {error}") from error
    files = [entry for entry in (*entries, *templates.glob("*")) if entry not in folders]
    names = sorted(file.relative_to(target).as_posix() for file in files)
    foreign = [name for name in names if not WRITTEN.fullmatch(name)]
    if foreign:
        raise FileExistsError(
            f"{target}: folder has files that replacing the checkpoint would delete: "
            f"{', '.join(foreign)}"
        )


def check_writable(folder: Path) -> None:
    """Refuse a folder in which no file can be made; one that is missing, where it cannot be made.

    Raises:
        OSError: by name of the folder.
    """
    while not folder.exists():
        folder = folder.parent
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise type(error)(f"{folder}: nothing can be written here: {error.strerror}") from error


def _card(model: PreTrainedModel) -> str:
    config = model.config.quantization_config
    weights = quantized_weights(model).values()
    rows: dict[str, Any] = {"architecture": type(model).__name__}
    if weights:
        kind = "nested" if config.four_bit is None else "4-bit"
        rows |= {"planes": _planes(config), "group size": config.group_size}
        rows |= {} if config.overlap is None else {"overlap": config.overlap}
        rows |= {f"{kind} linear layers": len(weights)}
    for part, name in PART_NAMES.items():
        sizes = [getattr(weight, part, None) for weight in weights]
        if found := [tensor.nbytes for tensor in sizes if tensor is not None]:
            rows[name] = f"{sum(found)} bytes"
    if config.kv is not None:
        rows["KV policy"] = config.kv
    for kind, indices in (config.skipped or {}).items():
        rows[f"layers whose {kind} the draft skips"] = ", ".join(map(str, indices)) or "none"
    return CARD.format(
        draft_alone=DRAFT_ALONE
        if weights and config.target_part and config.planes == "both"
        else "",
        meaning=_meaning(config),
        table="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )


def _planes(config: NestedConfig) -> str:
    if config.planes == "base" or config.target_part is None:
        return "base only"
    return f"base and {config.target_part}"


def _meaning(config: NestedConfig) -> str:
    """What is stored, in a sentence."""
    if not config.modules:
        return DENSE
    four_bit = config.four_bit_format
    if four_bit is None:
        return NESTED
    target = f"it with {four_bit.target_bits}-bit activations"
    if four_bit.target_bits is None:
        target = "the 16-bit weight beside it"
    return FOUR_BIT.format(draft_bits=four_bit.draft_bits, target=target)


def _sync(path: Path) -> None:
    """Have a file or the entries of a folder on the disk, not just in the cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(target: Path, complete: Path) -> None:
    """Put a complete folder in the place of another, which is back where it was on failure.

    A machine that goes down between the two renames leaves both folders whole, under their
    temporary names: no file system call at hand exchanges folders.
    """
    replaced = target.with_name(f".{target.name}.{uuid4().hex}.replaced")
    if target.exists():
        target.rename(replaced)
    try:
        complete.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        raise
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
