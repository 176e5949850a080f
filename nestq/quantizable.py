"""Which linears of a model a recipe quantizes, and what cannot be quantized."""

from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nestq.architectures import (
    HEAD,
    Architecture,
    UnsupportedArchitectureError,
    describe,
)
from nestq.four_bit_tensor import FourBitTensor
from nestq.recipes import RotationChoice
from nestq.tensor import NestedQuantTensor
from nestq.tensor_checks import check_weight


class QuantizingRecipe(Protocol):
    """What decides which linears are quantized."""

    @property
    def rotation(self) -> RotationChoice: ...
    @property
    def quantize_head(self) -> bool: ...


def known_architecture(
    model: nn.Module, recipe: QuantizingRecipe, needed: bool
) -> Architecture | None:
    """The model's parts; None if they are unknown and neither rotation nor GPTQ needs them."""
    try:
        return describe(model)
    except UnsupportedArchitectureError:
        if needed or recipe.rotation != "none":
            raise
        return None


def dense_linears(
    model: PreTrainedModel, architecture: Architecture | None, recipe: QuantizingRecipe
) -> dict[str, nn.Linear]:
    """Linears to quantize by name, in order of evaluation; each can be quantized."""
    if architecture is None:
        _refuse_conv1d(model)
        parts = _language_model(model)
        head: Any = model.get_output_embeddings()
        (parts.add if recipe.quantize_head else parts.discard)(head)
        linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module in parts
        }
    else:
        linears = dict(architecture.named_linears())
        if recipe.quantize_head:
            linears[HEAD] = architecture.head
    for name, linear in linears.items():
        check_linear(name, linear)
    return linears


def _language_model(model: PreTrainedModel) -> set[nn.Module]:
    """Modules of the language model: without the towers and projectors of a multimodal one."""
    config = model.config
    is_multimodal = config.get_text_config(decoder=True) is not config
    return set((model.get_decoder() if is_multimodal else model).modules())


def _refuse_conv1d(model: nn.Module) -> None:
    """GPT-2 keeps its weights in these, transposed: all but the head would be left dense."""
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise UnsupportedArchitectureError(
                f"model: {name} of {type(model).__name__} is a transformers Conv1D, and only "
                "nn.Linear can be nested"
            )


def check_linear(name: str, linear: nn.Linear) -> None:
    """Refuse a linear whose weight cannot be quantized, by name."""
    weight = linear.weight
    if isinstance(weight, NestedQuantTensor):
        raise ValueError(f"model: {name} is nested already")
    if isinstance(weight, FourBitTensor):
        raise ValueError(f"model: {name} is quantized already")
    if type(weight) is not nn.Parameter:
        raise ValueError(f"model: {name}.weight must be dense, got {type(weight).__name__}")
    if weight.is_meta:
        raise ValueError(f"model: {name}.weight is on the meta device; load the weights first")
    check_weight(weight, f"model: {name}.weight")
