"""``NestedKVCache``: one KV cache that a draft reads at 4 and a target at 8 bits."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.kv_policy import WHOLE, KVPolicy, KVRead
from nestq.reference.kv import SCALE_DTYPE, dequantize_kv
from nestq.sparse_reads import SnapKV
from nestq.view import current_view

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class NestedStates:
    """Keys or values as a forward pass reads them, in place of a dense tensor.

    Attributes:
        base: uint8 ``[B, H_kv, S, D / 2]``.
        refinement: the same, or None where only the base is read.
        scale: float32 ``[B, H_kv, S]``.
        positions: int64 ``[B, n]``, of the queries of this pass.
        read: what is read.
        rotated: of keys, whether they are stored as ``nestq::hadamard`` of them: queries are to be
            transformed, too.
    """

    base: Tensor
    refinement: Tensor | None
    scale: Tensor
    positions: Tensor
    read: KVRead
    rotated: bool = False

    @property
    def shape(self) -> NoReturn:
        """Every attention of transformers asks for it first, and has no use for planes."""
        raise TypeError(
            "inside NestedKVCache.at(...) only the attention implementation 'nestq' can read the "
            "cache: run the model inside nested_attention_implementation(model)"
        )


class KVPlanes:
    """Nested storage of the keys, or the values, of one layer.

    Attributes:
        base: uint8 ``[B, H_kv, S, D / 2]``.
        refinement: uint8 ``[B, H_kv, S, D / 2]``.
        scale: float32 ``[B, H_kv, S]``.
    """

    def __init__(
        self, batch_size: int, heads: int, capacity: int, head_dim: int, device: Any = None
    ) -> None:
        shape = batch_size, heads, capacity
        self.base = torch.zeros(*shape, head_dim // 2, dtype=torch.uint8, device=device)
        self.refinement = torch.zeros_like(self.base)
        self.scale = torch.zeros(shape, dtype=SCALE_DTYPE, device=device)

    def append(self, states: Tensor, positions: Tensor) -> None:
        """Quantize states ``[B, H_kv, n, D]`` and write them at positions ``[B, n]``."""
        torch.ops.nestq.kv_append(states, positions, *self._planes())

    def states(self, read: KVRead, positions: Tensor, rotated: bool = False) -> NestedStates:
        """What ``nestq::nested_attention`` reads for queries at positions ``[B, n]``."""
        refinement = self.refinement if read.refinement else None
        return NestedStates(self.base, refinement, self.scale, positions, read, rotated)

    def dense(self, read: KVRead, length: int, dtype: torch.dtype) -> Tensor:
        """The first ``length`` slots, dequantized: ``[B, H_kv, length, D]``.

        Recent entries are counted from the last slot, not from each query.
        """
        base, refinement, scale = (plane[:, :, :length] for plane in self._planes())
        if not read.refinement:
            return dequantize_kv(base, None, scale, dtype)
        dense = dequantize_kv(base, refinement, scale, dtype)
        old = max(0, length - read.recent) if read.recent else 0
        dense[:, :, :old] = dequantize_kv(base[:, :, :old], None, scale[:, :, :old], dtype)
        return dense

    def replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every plane by a function of it."""
        self.base, self.refinement, self.scale = map(function, self._planes())

    def grown(self, count: int) -> "KVPlanes":
        """The same with room for ``count`` more positions, in new tensors."""
        planes = copy.copy(self)
        planes.replace(
            lambda p: torch.cat((p, p.new_zeros(*p.shape[:2], count, *p.shape[3:])), dim=2)
        )
        return planes

    def _planes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.base, self.refinement, self.scale


class NestedKVLayer(CacheLayerMixin):
    """Nested keys and values of one decoder layer, preallocated.

    Sliding-window layers store all positions too: the window is applied by mask or attention.
    """

    is_croppable = True
    is_sliding = False

    def __init__(
        self,
        batch_size: int,
        heads: int,
        capacity: int,
        head_dim: int,
        policy: KVPolicy,
        device: Any = None,
        rotate_keys: bool = False,
    ) -> None:
        super().__init__()
        self.rotate_keys = rotate_keys
        self.key_planes = KVPlanes(batch_size, heads, capacity, head_dim, device)
        self.value_planes = KVPlanes(batch_size, heads, capacity, head_dim, device)
        self.capacity = capacity
        self.policy = policy
        self.device = self.key_planes.base.device
        self.length = 0
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        """Rows that the planes hold."""
        return self.key_planes.base.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the planes exist from construction on."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states after the common length and return what the current view reads.

        Args:
            key_states: ``[B, H_kv, n, D]``.
            value_states: ``[B, H_kv, n, D]``.
            *args: ignored.
            **kwargs: ignored.

        Returns:
            Dense keys and values ``[B, H_kv, length, D]`` in the dtype of the states.
        """
        batch, _, count, _ = key_states.shape
        if batch != self.batch_size:
            raise ValueError(
                f"key_states must have the cache's batch_size {self.batch_size}, got {batch}"
            )
        length = self.length + count
        if length > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions and {length} are needed: "
                "construct NestedKVCache with a larger max_length"
            )
        positions = torch.arange(self.length, length, device=key_states.device).expand(batch, -1)
        self.key_planes.append(self.stored(key_states), positions)
        self.value_planes.append(value_states, positions)
        self.length = length
        read = self.policy.read(current_view(), length)
        if read.sparse is not None:
            raise TypeError(
                f"the sparse draft {self.policy} reads a NestedKVCache inside "
                "NestedKVCache.at(positions) only"
            )
        # Keys that are to be transformed back are rounded once, then.
        dtype = key_states.dtype
        wide = torch.promote_types(dtype, SCALE_DTYPE) if self.rotate_keys else dtype
        keys = self.stored(self.key_planes.dense(read, length, wide)).to(dtype)
        return keys, self.value_planes.dense(read, length, value_states.dtype)

    def stored(self, key_states: Tensor) -> Tensor:
        """Keys ``[B, H_kv, n, D]`` as the planes hold them or, the other way, as models know them.

        ``nestq::hadamard`` undoes itself.
        """
        return torch.ops.nestq.hadamard(key_states) if self.rotate_keys else key_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that :meth:`update` will return."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions appended by :meth:`update`."""
        return self.length

    def get_max_length(self) -> int:
        """Positions that the planes hold."""
        return self.capacity

    def grown(self, capacity: int) -> "NestedKVLayer":
        """The same with room for ``capacity`` positions, in new tensors."""
        layer = copy.copy(self)
        layer.capacity = capacity
        layer.key_planes = self.key_planes.grown(capacity - self.capacity)
        layer.value_planes = self.value_planes.grown(capacity - self.capacity)
        return layer

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions; the count must not be positive."""
        if tokens_to_remove > 0:
            raise ValueError(
                "tokens_to_remove must be 0 or negative, as many as to remove, "
                f"got {tokens_to_remove}"
            )
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget all positions."""
        self.length = 0

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i what row ``beam_idx[i]`` was, in the same memory."""
        self._replace(lambda plane: plane.copy_(plane.index_select(0, beam_idx.to(plane.device))))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._replace(lambda plane: plane.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._replace(lambda plane: plane[indices.to(plane.device)])

    def offload(self) -> None:
        """Move the planes to the CPU."""
        self._replace(lambda plane: plane.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the planes back to the device of the layer."""
        self._replace(lambda plane: plane.to(self.device, non_blocking=True))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        self.key_planes.replace(function)
        self.value_planes.replace(function)


class NestedKVCache(Cache):
    """Keys and values of a model as 4-bit base and refinement planes (BitNest paper, A.2).

    Given to a model or to ``generate`` as it is, the cache appends, and returns dense keys and
    values as the current view reads them. Inside :meth:`at` it writes at given positions, a slot
    a position, and the attention ``"nestq"`` reads the planes themselves.

    Args:
        config: of the model, or of the whole of a multimodal one.
        max_length: positions to allocate.
        batch_size: rows to allocate; beams count as rows.
        device: of the planes.
        policy: what drafts read: ``"kv8/kv8"``, ``"kv4/kv8"``, ``"kv4/kv4"``, ``"recent(n)"`` or
            ``"auto(n)"``, which ``"+streaming(sink,recent)"`` may follow. Sparse drafts read inside
            :meth:`at` only.
        rotate_keys: whether keys are stored as ``nestq::hadamard`` of them, after rotary
            embeddings, and queries are transformed alike. In real numbers scores are the same. A
            channel that is much larger than the others, which would leave those hardly a code of
            a 4-bit key, is spread over its head. None to do what quantizing the model found
            (``config.quantization_config.rotate_keys``), False for a model that is not quantized.

    Attributes:
        lengths: int64 ``[batch_size]`` on the device, verified positions of each row. The owner
            of a round sets them, and rolls back by lowering them; nothing here reads them.
        policy: the parsed policy.
        rotate_keys: whether keys are rotated.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int,
        batch_size: int = 1,
        device: torch.device | str | None = None,
        policy: str | KVPolicy = "kv8/kv8",
        rotate_keys: bool | None = None,
    ) -> None:
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        self.policy = KVPolicy.parse(policy)
        other = {"quantspec": "QuantSpecKVCache", "dense": "DenseKVCache"}.get(self.policy.kind)
        if isinstance(self.policy.sparse, SnapKV):
            other = "SnapKVCache"
        if other is not None:
            raise ValueError(
                f"policy must be that of nested planes, got {str(self.policy)!r}, which is the "
                f"policy of a {other}"
            )
        if rotate_keys is not None and not isinstance(rotate_keys, bool):
            raise ValueError(f"rotate_keys must be a bool or None, got {rotate_keys!r}")
        self.rotate_keys = rotates_keys(config) if rotate_keys is None else rotate_keys
        config = config.get_text_config(decoder=True)
        heads, head_dim = head_sizes(config)
        sizes = batch_size, heads, max_length, head_dim
        layers: list[Any] = [
            NestedKVLayer(*sizes, self.policy, device, self.rotate_keys)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(layers=layers)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._positions: Tensor | None = None
        self._draft_read = self._target_read = WHOLE

    @contextmanager
    def at(self, positions: Tensor, context_length: int | None = None) -> Iterator[None]:
        """Context in which a forward pass writes at, and attends from, given positions.

        Run the model inside ``nested_attention_implementation(model)`` and give it the positions
        as ``position_ids`` too.

        Args:
            positions: int64 ``[batch_size, n]``, negative for pads, which are never written.
            context_length: cached positions as the host knows them; needed by ``auto(n)``.
        """
        check_cache_positions(positions, len(self.lengths))
        outer = self._positions, self._draft_read, self._target_read
        # Resolved here, so that a compiled model depends on the choice and not on the length.
        self._draft_read = self.policy.read("draft", context_length)
        self._target_read = self.policy.read("target", context_length)
        self._positions = positions
        try:
            yield
        finally:
            self._positions, self._draft_read, self._target_read = outer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write the states of a layer and return what attention is to read.

        Args:
            key_states: ``[B, H_kv, n, D]``.
            value_states: ``[B, H_kv, n, D]``.
            layer_idx: index of the layer.
            *args: ignored.
            **kwargs: ignored.

        Returns:
            Inside :meth:`at` two :class:`NestedStates`, else two dense tensors.
        """
        if self._positions is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        read = self._draft_read if current_view() == "draft" else self._target_read
        layer.key_planes.append(layer.stored(key_states), self._positions)
        layer.value_planes.append(value_states, self._positions)
        return (
            layer.key_planes.states(read, self._positions, self.rotate_keys),
            layer.value_planes.states(read, self._positions),
        )

    def grow(self, max_length: int) -> None:
        """Make room for ``max_length`` positions, more than there is; what is cached stays.

        Layers and planes become new objects: CUDA graphs over the old ones still have their memory.
        """
        if max_length < self.get_max_length():
            raise ValueError(
                f"max_length must be at least {self.get_max_length()}, which the cache has room "
                f"for, got {max_length}"
            )
        layers: list[Any] = self.layers
        self.layers = [layer.grown(max_length) for layer in layers]

    def reset(self) -> None:
        """Forget all positions; the memory stays."""
        super().reset()
        self.lengths.zero_()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i what row ``beam_idx[i]`` was, in the same memory."""
        super().reorder_cache(beam_idx)
        self.lengths.copy_(self.lengths[beam_idx.to(self.lengths.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self.lengths = self.lengths.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        super().batch_select_indices(indices)
        self.lengths = self.lengths[indices.to(self.lengths.device)]


def check_cache_positions(positions: Tensor, batch: int) -> None:
    """Refuse what are no positions of a forward pass, int64 ``[batch, n]``."""
    if positions.dtype != torch.int64 or positions.dim() != 2 or len(positions) != batch:
        raise ValueError(
            f"positions must be int64 of shape [{batch}, n], "
            f"got {positions.dtype} of shape {tuple(positions.shape)}"
        )


def rotates_keys(config: PreTrainedConfig) -> bool:
    """Whether quantizing the model of a config found that its keys need to be rotated."""
    return bool(getattr(getattr(config, "quantization_config", None), "rotate_keys", False))


def head_sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Number of KV heads and head size; refuses what the cache cannot hold."""
    unsupported = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if unsupported:
        raise ValueError(
            f"config must have layers of the types {_LAYER_TYPES}, got {sorted(unsupported)}"
        )
    query_heads = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    if head_dim % 2:
        raise ValueError(f"config must have an even head size, got {head_dim}")
    return heads, head_dim


def cache_keyword(model: torch.nn.Module) -> str:
    """Name of the forward's cache argument: ``"cache"``, or ``"past_key_values"`` before it.

    Args:
        model: a transformers model, compiled or not.
    """
    model = getattr(model, "_orig_mod", model)
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError(
        f"model must take 'cache' or 'past_key_values' in its forward, got {type(model).__name__} "
        f"with {sorted(parameters)}"
    )
