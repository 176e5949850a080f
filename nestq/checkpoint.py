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
from nestq.hf_quantizer import NestedConfig, NestedQuantizer, attach, nested_weights

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
draft = nestq.load("<this folder>", planes="base")  # the draft alone: half the bytes
```

Written by nestq. Every nested weight is a 4-bit base plane, which is the draft, and a 4-bit
refinement plane, which added to the base makes the 8-bit target.

| | |
|---|---|
| architecture | {architecture} |
| planes | {planes} |
| group size | {group_size} |
| overlap | {overlap} |
| nested linear layers | {layers} |
| base planes | {base} bytes |
| refinement planes | {refinement} bytes |
| scales | {scale} bytes |
"""


def save(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """Save a nested model, with a README, so that the folder is complete or does not exist.

    Everything is written into a temporary folder beside it, flushed to the disk, and renamed. A
    nestq checkpoint that is there already is replaced as a whole, once the new one is complete.
    ``model.save_pretrained`` writes the same tensors, but in place, and cannot save a model that
    ``torchao.quantization.quantize_`` nested; this can.

    Args:
        model: a model with nested weights.
        folder: where to; its parents are created.
        tokenizer: saved into the folder too, if given.
        max_shard_size: of a safetensors file, as ``save_pretrained`` takes it.

    Raises:
        TypeError: the model is none of transformers, or the tokenizer cannot be saved.
        ValueError: the model has no nested weight, or was quantized by another method.
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
    """Load a nested causal language model from a folder; the files are memory-mapped.

    Args:
        folder: a checkpoint that :func:`save` or ``save_pretrained`` wrote.
        planes: ``"both"``, or ``"base"`` for the draft alone: refinement planes are not read, and
            the target view raises an error.
        dtype: of the dense weights, and what nested ones stand for; default: as saved.
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
    return model if device is None else model.to(device)  # type: ignore[arg-type]


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
    weights = nested_weights(model).values()
    sizes = {
        part: sum(getattr(weight, part).nbytes for weight in weights) for part in ("base", "scale")
    }
    refinements = (weight.refinement for weight in weights)
    return CARD.format(
        architecture=type(model).__name__,
        planes="base and refinement" if config.planes == "both" else "base only",
        group_size=config.group_size,
        overlap=config.overlap,
        layers=len(weights),
        refinement=sum(plane.nbytes for plane in refinements if plane is not None),
        **sizes,
    )


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
