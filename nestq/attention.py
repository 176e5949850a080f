"""The attention implementation ``"nestq"`` of transformers: nested planes, masked by position."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from nestq.dense_kv_cache import DenseStates
from nestq.kv_cache import NestedStates
from nestq.quantspec_kv_cache import QuantSpecStates
from nestq.snapkv_cache import PromptKeys

IMPLEMENTATION = "nestq"
# Arguments with which some models change the scores.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def nested_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: NestedStates | DenseStates | QuantSpecStates | PromptKeys,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over what a cache hands out inside ``at``; the caller is a transformers model.

    Args:
        module: the attention layer.
        query: ``[B, H, n, D]``.
        key: keys of a ``NestedKVCache``, a ``DenseKVCache`` or a ``QuantSpecKVCache``.
        value: values of the same cache.
        attention_mask: None; what is visible follows from positions.
        scaling: factor of the scores; default ``D ** -0.5``.
        sliding_window: keys that a query sees, itself included; None for all.
        dropout: 0.
        **kwargs: what the model passes besides; refused where it would change the result.

    Returns:
        ``[B, n, H, D]`` and None.

    Raises:
        TypeError: the keys are dense.
        ValueError: there is a mask.
        NotImplementedError: the model asks for dropout, capped scores, sinks or a bias.
    """
    prompt = key if isinstance(key, PromptKeys) else None
    key = key.keys if isinstance(key, PromptKeys) else key
    if not isinstance(key, NestedStates | DenseStates | QuantSpecStates):
        raise TypeError(
            "the attention implementation 'nestq' reads a NestedKVCache inside "
            f"NestedKVCache.at(positions), got keys of type {type(key).__name__}"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask must be None: 'nestq' attention masks by position")
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if dropout:
        unsupported.append("dropout")
    if unsupported:
        raise NotImplementedError(f"'nestq' attention does not implement {unsupported}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if isinstance(key, NestedStates) and key.rotated:
        query = torch.ops.nestq.hadamard(query)
    if prompt is not None:
        prompt.keep(query, scaling)
    if isinstance(key, DenseStates):
        out = torch.ops.nestq.attention_16(
            query, key.positions, key.cached, value.cached, scaling, window, *key.read.reach
        )
        return out.transpose(1, 2), None
    if isinstance(key, QuantSpecStates):
        out = torch.ops.nestq.quantspec_attention(
            query,
            key.new,
            value.new,
            key.positions,
            *key.planes.tensors(),
            *value.planes.tensors(),
            key.refinement,
            scaling,
            window,
        )
        return out.transpose(1, 2), None
    out = torch.ops.nestq.nested_attention(
        query,
        key.positions,
        key.base,
        key.refinement,
        key.scale,
        value.base,
        value.refinement,
        value.scale,
        scaling,
        window,
        key.read.recent,
        *key.read.reach,
    )
    return out.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, nested_attention_forward)


@dataclass
class _Switched:
    """A config that is set to ``"nestq"``, what it was set to before, and who still needs it."""

    config: Any
    before: str | None
    users: int = 0


_switched: dict[int, _Switched] = {}  # by identity of the config: configs have no hash
_lock = Lock()


@contextmanager
def nested_attention_implementation(model: Any) -> Iterator[None]:
    """Context in which a transformers model, compiled or not, attends with ``"nestq"``.

    Threads may be in it at the same time and leave it in any order; the last one to leave puts back
    what the first one found. The config belongs to the model and not to a thread, so until then any
    other forward pass of the model attends with ``"nestq"`` too, and raises TypeError.
    """
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}
    with _lock:
        for key, config in configs.items():
            if key not in _switched:
                _switched[key] = _Switched(config, config._attn_implementation_internal)
                config._attn_implementation_internal = IMPLEMENTATION
            _switched[key].users += 1
    try:
        yield
    finally:
        with _lock:
            for key, config in configs.items():
                _switched[key].users -= 1
                if not _switched[key].users:
                    config._attn_implementation_internal = _switched.pop(key).before
