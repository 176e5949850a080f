"""``DenseKVCache``: a cache of 16-bit numbers, with which dense models decode as nested ones."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.argument_checks import check_int
from nestq.cache_rows import PositionedCache, PositionedLayer, check_kernel_dtype
from nestq.kv_cache import check_cache_positions, head_sizes
from nestq.kv_policy import KVPolicy, KVRead
from nestq.sparse_reads import SnapKV
from nestq.view import current_view


@dataclass(frozen=True)
class DenseStates:
    """Keys or values as a forward pass reads them.

    Attributes:
        cached: ``[B, H_kv, S, D]``.
        positions: int64 ``[B, n]``, of the queries of this pass.
        read: what is read.
    """

    cached: Tensor
    positions: Tensor
    read: KVRead

    @property
    def shape(self) -> NoReturn:
        """Every attention of transformers asks for it first, and knows nothing of positions."""
        raise TypeError(
            "inside DenseKVCache.at(...) only the attention implementation 'nestq' can read the "
            "cache: run the model inside nested_attention_implementation(model)"
        )


class DenseKVLayer(PositionedLayer):
    """Keys and values of one decoder layer, preallocated: each ``[B, H_kv, S, D]``.

    Sliding-window layers store all positions too: attention applies the window.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.keys: Any = torch.zeros(shape, dtype=dtype, device=device)
        self.values: Any = torch.zeros_like(self.keys)
        self.capacity = shape[2]
        self.device = self.keys.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refused: where states belong is known inside ``DenseKVCache.at`` only."""
        raise TypeError("a DenseKVCache can be used inside DenseKVCache.at(positions) only")

    def grown(self, capacity: int) -> "DenseKVLayer":
        """The same with room for ``capacity`` positions, in new tensors."""
        layer = copy.copy(self)
        count = capacity - self.capacity
        layer._replace(lambda x: torch.cat((x, x.new_zeros(*x.shape[:2], count, x.shape[3])), 2))
        layer.capacity = capacity
        return layer

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values = function(self.keys), function(self.values)


class DenseKVCache(PositionedCache):
    """Keys and values of a model as 16-bit numbers, written and read at positions.

    It takes the place of a ``NestedKVCache``, with any weights, inside :meth:`at`; elsewhere it
    cannot be used. Draft and target read the same numbers.

    Args:
        config: of the model, or of the whole of a multimodal one.
        max_length: positions to allocate.
        batch_size: rows to allocate.
        device: of the tensors.
        dtype: of the tensors; on a GPU float16 or bfloat16.
        policy: ``"16/16"``, which a sparse draft may follow.

    Attributes:
        lengths: int64 ``[batch_size]`` on the device, verified positions of each row. The owner of
            a round sets them, and rolls back by lowering them; nothing here reads them.
        policy: the parsed policy.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int,
        batch_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        policy: str | KVPolicy = "16/16",
    ) -> None:
        check_int("max_length", max_length, 1)
        check_int("batch_size", batch_size, 1)
        self.policy = KVPolicy.parse(policy)
        if self.policy.kind != "dense" or isinstance(self.policy.sparse, SnapKV):
            raise ValueError(
                "policy must be '16/16' or '16/16+streaming(sink,recent)' for a DenseKVCache, got "
                f"{str(self.policy)!r}"
            )
        config = config.get_text_config(decoder=True)
        heads, head_dim = head_sizes(config)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        check_kernel_dtype(dtype, self.lengths.device)
        shape = batch_size, heads, max_length, head_dim
        layers: list[Any] = [
            DenseKVLayer(shape, dtype, device) for _ in range(config.num_hidden_layers)
        ]
        super().__init__(layers=layers)
        self._positions: Tensor | None = None

    @contextmanager
    def at(self, positions: Tensor, context_length: int | None = None) -> Iterator[None]:
        """Context in which a forward pass writes at, and attends from, given positions.

        Args:
            positions: int64 ``[batch_size, n]``, negative for pads, which are never written.
            context_length: ignored; a nested cache may need it.
        """
        check_cache_positions(positions, len(self.lengths))
        outer, self._positions = self._positions, positions
        try:
            yield
        finally:
            self._positions = outer

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
            Two :class:`DenseStates`.

        Raises:
            TypeError: outside of :meth:`at`.
        """
        layer: Any = self.layers[layer_idx]
        positions = self._positions
        if positions is None:
            return layer.update(key_states, value_states)
        torch.ops.nestq.append_16(key_states, value_states, positions, layer.keys, layer.values)
        read = self.policy.read(current_view(), None)
        return (
            DenseStates(layer.keys, positions, read),
            DenseStates(layer.values, positions, read),
        )

    def grow(self, max_length: int) -> None:
        """Make room for ``max_length`` positions, more than there is; what is cached stays.

        Layers become new objects: CUDA graphs over the old ones still have their memory.
        """
        if max_length < self.get_max_length():
            raise ValueError(
                f"max_length must be at least {self.get_max_length()}, which the cache has room "
                f"for, got {max_length}"
            )
        layers: list[Any] = self.layers
        self.layers = [layer.grown(max_length) for layer in layers]
