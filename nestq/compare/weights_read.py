"""Which weights a forward pass of a view reads, by looking at one.

A recipe may keep any number of tensors in a weight, and a view reads some of them. So nothing is
assumed here about what is stored: the tensors that operators are given are counted.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from nestq.attention import nested_attention_implementation
from nestq.kv_caches import new_cache
from nestq.kv_policy import KVPolicy
from nestq.speculative.round import NestedForward
from nestq.view import View

# An embedding reads a row for each token, not all of its weight.
_READS_ROWS = (torch.ops.aten.embedding.default,)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that one is made of; a plain one alone."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_tensors(getattr(tensor, name))]


def weight_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Plain tensors that the parameters of a model are made of, each once, by address."""
    parts = (part for weight in model.parameters() for part in plain_tensors(weight))
    return {part.data_ptr(): part for part in parts}


def stored_weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(tensor.nbytes for tensor in weight_tensors(model).values())


@torch.no_grad()
def weight_bytes_read(model: PreTrainedModel, view: View | None) -> int:
    """Bytes of the parameters that a decoding step reads, whatever the recipe is.

    Rows of the embedding are left out: they are few.

    Args:
        model: any that decodes.
        view: that is read; None for a model that knows no views, as it is.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    observed = _ReadTensors(weight_tensors(model))
    if view is None:
        with observed:
            model(input_ids=token, use_cache=False)
    else:
        config = model.config.get_text_config(decoder=True)
        cache = new_cache(KVPolicy.parse("16/16"), config, 1, 1, model.device, model.dtype)
        with nested_attention_implementation(model):
            forward = NestedForward(model, model, cache, token)
            with observed:
                forward(view, token, token)
    return sum(tensor.nbytes for tensor in observed.read.values())


class _ReadTensors(TorchDispatchMode):
    """Notes which of some tensors operators are given."""

    def __init__(self, known: dict[int, Tensor]) -> None:
        super().__init__()
        self.known = known
        self.read: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # the tensor takes itself apart, and its parts come by here
        if not func.is_view and func not in _READS_ROWS:
            for tensor in tensors:
                address = tensor.data_ptr()
                if address in self.known:
                    self.read[address] = self.known[address]
        return func(*args, **kwargs)
