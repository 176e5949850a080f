"""What captured rounds depend on: the state of a model, and settings of PyTorch.

A CUDA graph has the addresses of weights and all that Python had decided when it was captured. It
may be replayed only where both are still the same. Numbers that change in place are read anew.
"""

from collections.abc import Hashable, Iterator, Mapping, Set
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

# What every module has: hooks and tensors are looked at by themselves, training is refused.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
# What generate and its callers write into models without changing a forward pass.
_OF_NO_EFFECT = frozenset({"generation_config", "warnings_issued"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)


def model_key(model: PreTrainedModel) -> Hashable:
    """A value that stays the same while captured rounds of a model may be replayed.

    It has, of each module: its type; hooks; where its parameters, buffers and other tensors lie and
    how they are read; and its other attributes, containers and configs among them, by their values.
    Objects of other kinds count by their identity, and it is not seen when they change.
    """
    configs: dict[int, Hashable] = {}
    parts = []
    for name, module in model.named_modules():
        hooks = tuple(tuple(getattr(module, kind)) for kind in _HOOKS)  # each has a number for life
        tensors = (*module._parameters.items(), *module._buffers.items())
        own = {name: value for name, value in vars(module).items() if name not in _OF_ALL_MODULES}
        values = tuple(
            (name, _value(value, configs))
            for name, value in (*tensors, *own.items())
            if name not in _OF_NO_EFFECT
        )
        parts.append((name, type(module), hooks, values))
    return tuple(parts), model._compiled_call_impl is None


def settings_key() -> Hashable:
    """Settings of PyTorch that are part of what a graph computes."""
    kind = "cuda"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (
        autocast,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _value(value: Any, configs: dict[int, Hashable]) -> Hashable:
    """What an attribute is compared by.

    Args:
        value: of the attribute.
        configs: those that were seen before, by identity: most modules share one.
    """
    if isinstance(value, _PLAIN):
        # By their text: NaN is not equal to itself, and True is equal to 1.
        return value if isinstance(value, type) else repr(value)
    if isinstance(value, Tensor):
        return tuple(_places(value))
    if isinstance(value, PreTrainedConfig):
        if id(value) not in configs:
            configs[id(value)] = ()  # a config may refer to itself
            configs[id(value)] = _items(_without_attention(vars(value)), configs)
        return configs[id(value)]
    if isinstance(value, Mapping):
        return _items(value, configs)
    if isinstance(value, list | tuple):
        return tuple(_value(part, configs) for part in value)
    if isinstance(value, Set):
        return frozenset(_value(part, configs) for part in value)
    if isinstance(value, nn.Module):  # one of the model's: it is looked at by itself
        return type(value), id(value)
    return _identity(value)


def _items(values: Mapping[Any, Any], configs: dict[int, Hashable]) -> Hashable:
    return tuple((repr(name), _value(value, configs)) for name, value in values.items())


def _without_attention(values: Mapping[str, Any]) -> dict[str, Any]:
    """All but the attention implementation, which calls set while they run."""
    return {name: value for name, value in values.items() if not name.startswith("_attn")}


def _places(tensor: Tensor) -> Iterator[Hashable]:
    """Where the planes of a tensor lie, and how they are read."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, constants = tensor.__tensor_flatten__()
        yield type(tensor), repr(constants)
        for name in names:
            yield from _places(getattr(tensor, name))
    else:
        yield tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _identity(value: Any) -> Hashable:
    """An object that lives at most as long as a key must know it: no other object is equal to it.

    Its number could be that of another one later. A method is made each time it is asked for.
    """
    method = getattr(value, "__func__", None)
    if method is not None:
        return _Reference(method), id(value.__self__)
    try:
        return _Reference(value)
    except TypeError:  # no weak reference to it
        return type(value), repr(value)


class _Reference:
    """A weak reference that is equal to others while the object lives, by its identity."""

    def __init__(self, value: Any) -> None:
        self._ref: ReferenceType[Any] = ref(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Reference):
            return NotImplemented
        return self is other or (self._ref() is not None and self._ref() is other._ref())

    def __hash__(self) -> int:
        return 0
