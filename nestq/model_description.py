"""What a model holds, as its ``quantization_config`` says it."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nestq.checkpoint_format import FORMAT_VERSION
from nestq.four_bit_tensor import FourBitTensor
from nestq.layer_skipping import skipped_in_draft
from nestq.nested_config import NestedConfig
from nestq.stored_weights import QuantizedWeight
from nestq.tensor import NestedQuantTensor


def nested_weights(model: nn.Module) -> dict[str, NestedQuantTensor]:
    """Nested weights of a model by the name of their module."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), NestedQuantTensor)
    }


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Nested weights and 4-bit ones of a model by the name of their module."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedWeight)
    }


def refuse_compiled_parts(names: Iterable[str]) -> None:
    """Refuse module names that ``torch.compile`` changed: no other model could load them."""
    for name in names:
        if "_orig_mod" in name:
            raise ValueError(
                f"model: {name} is in a part that torch.compile wrapped: nest and save a model "
                "before its parts are compiled, or compile them in place by module.compile()"
            )


def describe(
    model: nn.Module,
    recipe: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    kv: str | None = None,
    rotate_keys: bool = False,
) -> NestedConfig:
    """The ``quantization_config`` of a model as it is, with what its draft skips.

    Raises:
        ValueError: there is nothing to say, for no weight is quantized, no layer is skipped and kv
            is None; quantized weights differ in their format; recipe or report is not JSON; or a
            part of the model is compiled.
    """
    weights = quantized_weights(model)
    refuse_compiled_parts(weights)
    skipped = skipped_in_draft(model)
    if not (weights or kv or any(skipped.values())):
        raise ValueError("model has no nested weight: quantize it first")
    for name, value in (("recipe", recipe), ("report", report)):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be JSON: {error}") from error
    return NestedConfig(
        format_version=FORMAT_VERSION,
        modules=list(weights),
        recipe=recipe,
        report=report,
        kv=kv,
        skipped=skipped if any(skipped.values()) else None,
        rotate_keys=rotate_keys,
        **_common_format(model, weights),
    )


def _common_format(model: nn.Module, weights: dict[str, QuantizedWeight]) -> dict[str, Any]:
    """Entries of the configuration in which all quantized weights must agree.

    Raises:
        ValueError: they do not.
    """
    if not weights:
        return {"group_size": None, "overlap": None}
    nested = [w for w in weights.values() if isinstance(w, NestedQuantTensor)]
    four_bit = {n: w for n, w in weights.items() if isinstance(w, FourBitTensor)}
    if nested and four_bit:
        raise ValueError(
            "all quantized weights of a model must be nested, or all of 4 bits, got "
            f"{len(nested)} nested and {len(four_bit)} of 4 bits"
        )
    if four_bit:
        return _four_bit_format(model, four_bit)
    group_size, overlap, has_refinement = _agreed(
        "group_size, overlap, has refinement",
        {(w.group_size, w.overlap, w.refinement is not None) for w in nested},
    )
    planes = "both" if has_refinement else "base"
    return {"group_size": group_size, "overlap": overlap, "planes": planes}


def _four_bit_format(model: nn.Module, weights: dict[str, FourBitTensor]) -> dict[str, Any]:
    group_size, draft_bits, target_bits, has_dense = _agreed(
        "group_size, draft_bits, target_bits, has dense",
        {
            (w.group_size, w.draft_bits, w.target_bits, w.dense is not None)
            for w in weights.values()
        },
    )
    complete = has_dense or target_bits is not None
    return {
        "group_size": group_size,
        "overlap": None,
        "planes": "both" if complete else "base",
        "four_bit": {
            "draft_bits": draft_bits,
            "target_bits": target_bits,
            "input_rotation": {n: w.input_rotation for n, w in weights.items() if w.input_rotation},
            "tied_head": _dense_is_embedding(model),
        },
    }


def _agreed(names: str, formats: set[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The one format that there is."""
    if len(formats) > 1:
        raise ValueError(
            f"all quantized weights of a model must agree in ({names}), "
            f"got {sorted(formats, key=str)}"
        )
    return formats.pop()


def _dense_is_embedding(model: Any) -> bool:
    """Whether the target of a 4-bit head reads the numbers that the embedding has."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    dense = getattr(getattr(head, "weight", None), "dense", None)
    if dense is None:
        return False
    embedding: Tensor = model.get_input_embeddings().weight
    # Moving a model gives both a place of their own: addresses do not tell.
    return embedding.shape == dense.shape and torch.equal(embedding.to(dense), dense)


def tied_head(model: PreTrainedModel, config: NestedConfig) -> str | None:
    """Name of the head, if its dense weight is the embedding's and stored there."""
    four_bit = config.four_bit_format
    if four_bit is None or not four_bit.tied_head:
        return None
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name not in config.modules:
        raise ValueError(
            "quantization_config.four_bit has tied_head, and modules does not list the head, "
            f"{name!r}"
        )
    return name


def share_tied_head_(model: PreTrainedModel, config: NestedConfig) -> None:
    """Have the head's dense weight be the embedding's again, where config says that it is.

    Loading leaves it out, and moving a model makes two of it.
    """
    if config.planes == "both" and tied_head(model, config) is not None:
        weight: Any = model.get_output_embeddings().weight
        embedding: Any = model.get_input_embeddings().weight
        weight.dense = embedding.detach().to(weight.device)
