"""``DenseKVCache``: a cache of 16-bit numbers in place of a nested one, to compare with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.kv_cache import check_cache_positions, head_sizes


@dataclass(frozen=True)
class DenseStates:
    """Keys or values as a forward pass reads them.

    Attributes:
        cached: ``[B, H_kv, S, D]``.
        positions: int64 ``[B, n]``, of the queries of this pass.
    """

    cached: Tensor
    positions: Tensor

    @property
    def shape(self) -> NoReturn:
        """Every attention of transformers asks for it first, and knows nothing of positions."""
        raise TypeError(
            "inside DenseKVCache.at(...) only the attention implementation 'nestq' can read the "
            "cache: run the model inside nested_attention_implementation(model)"
        )


class DenseKVLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, preallocated."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.keys: Any = torch.zeros(shape, dtype=dtype, device=device)
        self.values: Any = torch.zeros_like(self.keys)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors exist from construction on."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refused: where states belong is known inside ``DenseKVCache.at`` only."""
        raise TypeError("a DenseKVCache can be used inside DenseKVCache.at(positions) only")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys; attention masks by position."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: ``DenseKVCache.lengths`` says how many positions are valid."""
        return 0

    def get_max_length(self) -> int:
        """Positions that the tensors hold."""
        return self.keys.shape[2]


class DenseKVCache(Cache):
    """Keys and values of a model as 16-bit numbers, written and read at positions.

    It takes the place of a ``NestedKVCache`` in a round without drafts: a dense model then decodes
    in the same engine.

    Args:
        config: of the model, or of the whole of a multimodal one.
        max_length: positions to allocate.
        batch_size: rows to allocate.
        device: of the tensors.
        dtype: of the tensors; on a GPU float16 or bfloat16.

    Attributes:
        lengths: int64 ``[batch_size]`` on the device, valid positions of each row. The owner of a
            round sets them; nothing here reads them.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int,
        batch_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        config = config.get_text_config(decoder=True)
        heads, head_dim = head_sizes(config)
        shape = batch_size, heads, max_length, head_dim
        layers: list[Any] = [
            DenseKVLayer(shape, dtype, device) for _ in range(config.num_hidden_layers)
        ]
        super().__init__(layers=layers)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
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
        return DenseStates(layer.keys, positions), DenseStates(layer.values, positions)
