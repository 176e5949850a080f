"""Small nested models, rounded to nearest, and what it means that two are the same."""

from typing import Any

import small_models
import torch
from nested_tensors import assert_same_bytes
from torch import nn
from transformers import PreTrainedModel

from nestq.hf_quantizer import attach, nested_weights
from nestq.tensor import NestedQuantTensor
from nestq.view import nest_view

RECIPE = {"name": "nearest", "nested": {"head": True}}
REPORT = {"layers": [{"name": "lm_head", "saturation": 0.25}]}


def nest_(
    model: PreTrainedModel, head: bool = True, group_size: int = 32, overlap: int = 8
) -> PreTrainedModel:
    """Nest all linear layers of a model in place; with ``head=False`` all but the head."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (head or name != "lm_head"):
            weight = NestedQuantTensor.from_hp(module.weight, group_size, overlap)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def build(family: str = "llama-gqa", head: bool = True, **options: Any) -> PreTrainedModel:
    """A nested model in bfloat16, ready to be saved."""
    options = {"dtype": torch.bfloat16, **options}
    model = nest_(small_models.build(family, **options), head)
    attach(model, RECIPE, REPORT)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, view: str) -> torch.Tensor:
    with nest_view(view):
        return model(small_models.tokens(model)).logits


def assert_same_model(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """The same tensors, bit for bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if isinstance(tensor, NestedQuantTensor):
            assert_same_bytes(tensor, theirs[name])
        else:
            assert torch.equal(tensor, theirs[name]), name


def assert_same_codes(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """The same nested weights, whatever the dtype of the model."""
    ours, theirs = nested_weights(one), nested_weights(other)
    assert ours
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert_same_bytes(weight, theirs[name])
