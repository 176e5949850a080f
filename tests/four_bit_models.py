"""Small models, quantized by the recipes of one 4-bit weight."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import small_models
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nestq import FourBitRecipe, nest_view, qspec_w4, quantize_, quantspec_w4w16, w4a8, w4a16
from nestq.four_bit_tensor import FourBitTensor

RECIPES: dict[str, Callable[..., FourBitRecipe]] = {
    "quantspec": quantspec_w4w16,
    "quantspec-weights": lambda **options: quantspec_w4w16(kv=False, **options),
    "qspec": qspec_w4,
    "w4a8": w4a8,
    "w4a16": w4a16,
}


@cache
def _quantized(name: str, family: str, tied: bool, dtype: torch.dtype) -> PreTrainedModel:
    model = small_models.build(family, tied=tied, dtype=dtype)
    model.generation_config.eos_token_id = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nothing calibrates
        quantize_(model, RECIPES[name](group_size=32), progress=False)
    return model


def quantized(
    name: str, family: str = "llama-gqa", tied: bool = False, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model rounded to nearest by a recipe, for a test to change; it never ends a sequence."""
    return copy.deepcopy(_quantized(name, family, tied, dtype))


def four_bit_weights(model: PreTrainedModel) -> dict[str, Any]:
    """By the names of their modules."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), FourBitTensor)
    }


@torch.no_grad()
def logits(model: PreTrainedModel, view: Any, tokens: Tensor | None = None) -> Tensor:
    with nest_view(view):
        return model(small_models.tokens(model) if tokens is None else tokens).logits
