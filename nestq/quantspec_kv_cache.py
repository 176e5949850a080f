"""``QuantSpecKVCache``: QuantSpec's hierarchical KV cache, quantized but for the recent tokens."""

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
from nestq.kv_policy import KVPolicy
from nestq.reference.kv_quantspec import GROUP, SCALE_DTYPE, value_groups
from nestq.reference.quantspec import SLOTS
from nestq.view import current_view


@dataclass
class QuantSpecPlanes:
    """Storage of the keys, or the values, of one layer.

    Attributes:
        recent: ``[B, H_kv, R, D]`` in full precision; token j is in slot ``j % R``.
        base: uint8 ``[B, H_kv, S, D / 2]``, upper nibbles.
        refinement: uint8 ``[B, H_kv, S, D / 2]``, lower nibbles.
        scale: float32, of keys ``[B, H_kv, S / 128, D]``, of values ``[B, H_kv, S, V]``.
        zero: the same, zero points.
    """

    recent: Tensor
    base: Tensor
    refinement: Tensor
    scale: Tensor
    zero: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the operator."""
        return self.recent, self.base, self.refinement, self.scale, self.zero

    def replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it."""
        self.recent, self.base, self.refinement, self.scale, self.zero = map(
            function, self.tensors()
        )


@dataclass(frozen=True)
class QuantSpecStates:
    """Keys or values of a forward pass, and what is cached: attention writes first, then reads.

    Attributes:
        new: ``[B, H_kv, n, D]``, not written yet.
        positions: int64 ``[B, n]``, of new tokens and queries.
        planes: what is cached.
        refinement: whether the lower nibbles are read.
    """

    new: Tensor
    positions: Tensor
    planes: QuantSpecPlanes
    refinement: bool

    @property
    def shape(self) -> NoReturn:
        """Every attention of transformers asks for it first, and has no use for planes."""
        raise TypeError(
            "inside QuantSpecKVCache.at(...) only the attention implementation 'nestq' can read "
            "the cache: run the model inside nested_attention_implementation(model)"
        )


class QuantSpecKVLayer(PositionedLayer):
    """Keys and values of one decoder layer, preallocated.

    Sliding-window layers store all positions too: attention applies the window.
    """

    def __init__(
        self,
        batch_size: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: Any = None,
    ) -> None:
        super().__init__()
        # The last two groups are never read quantized.
        slots = max(-(-capacity // GROUP) - 2, 1) * GROUP
        shape = batch_size, heads

        def planes(*scales: int) -> QuantSpecPlanes:
            recent = torch.zeros(*shape, SLOTS, head_dim, dtype=dtype, device=device)
            base = torch.zeros(*shape, slots, head_dim // 2, dtype=torch.uint8, device=device)
            scale = torch.zeros(*shape, *scales, dtype=SCALE_DTYPE, device=device)
            return QuantSpecPlanes(
                recent, base, torch.zeros_like(base), scale, torch.zeros_like(scale)
            )

        self.key_planes = planes(slots // GROUP, head_dim)
        self.value_planes = planes(slots, value_groups(head_dim))
        self.capacity = capacity
        self.device = self.key_planes.base.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refused: what a query reads depends on its position, which is known inside ``at``."""
        raise TypeError("a QuantSpecKVCache can be used inside QuantSpecKVCache.at(positions) only")

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        self.key_planes.replace(function)
        self.value_planes.replace(function)


class QuantSpecKVCache(PositionedCache):
    """Keys and values of a model as QuantSpec keeps them (QuantSpec paper, 4.2 and 4.3).

    The query at position p reads the last ``G + p % G + 1`` tokens, G = 128, in full precision, and
    older ones quantized: keys by channel in groups of G tokens, values by token in groups of up to
    G channels, the upper nibble from the smallest number of a group on, the lower one of its error.
    Drafts read upper nibbles, the target both. A group is quantized in the pass that is the first
    to read it so, when all of its tokens are verified.

    It takes the place of a ``NestedKVCache``, with any weights, inside :meth:`at`; elsewhere it
    cannot be used.

    Args:
        config: of the model, or of the whole of a multimodal one.
        max_length: positions to allocate.
        batch_size: rows to allocate.
        device: of all tensors.
        dtype: of recent tokens; None for the config's. On a GPU float16 or bfloat16.

    Attributes:
        lengths: int64 ``[batch_size]`` on the device, verified positions of each row. The owner of
            a round sets them; nothing here reads them. What was written behind them is overwritten.
        policy: ``KVPolicy("quantspec")``.

    Raises:
        ValueError: an argument is wrong, or groups do not divide the model's head size.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int,
        batch_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("max_length", max_length, 1)
        check_int("batch_size", batch_size, 1)
        text_config = config.get_text_config(decoder=True)
        heads, head_dim = head_sizes(text_config)
        try:
            value_groups(head_dim)
        except ValueError as error:
            raise ValueError(f"config cannot have a QuantSpecKVCache: {error}") from error
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        kept: Any = dtype or text_config.dtype or config.dtype or torch.get_default_dtype()
        check_kernel_dtype(kept, self.lengths.device)
        self.policy = KVPolicy("quantspec")
        layers: list[Any] = [
            QuantSpecKVLayer(batch_size, heads, max_length, head_dim, kept, device)
            for _ in range(text_config.num_hidden_layers)
        ]
        super().__init__(layers=layers)
        self._positions: Tensor | None = None

    @contextmanager
    def at(self, positions: Tensor, context_length: int | None = None) -> Iterator[None]:
        """Context in which a forward pass writes at, and attends from, given positions.

        Run the model inside ``nested_attention_implementation(model)`` and give it the positions
        as ``position_ids`` too.

        Args:
            positions: int64 ``[batch_size, n]``, consecutive; negative for pads, on the left, which
                are never written. Tokens G and more before the first one must be verified.
            context_length: ignored; another cache may need it.
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
        """Return what attention is to write and to read.

        Args:
            key_states: ``[B, H_kv, n, D]``.
            value_states: ``[B, H_kv, n, D]``.
            layer_idx: index of the layer.
            *args: ignored.
            **kwargs: ignored.

        Returns:
            Two :class:`QuantSpecStates`.

        Raises:
            TypeError: outside of :meth:`at`.
        """
        layer: Any = self.layers[layer_idx]
        positions = self._positions
        if positions is None:
            return layer.update(key_states, value_states)
        whole = current_view() == "target"
        return (
            QuantSpecStates(key_states, positions, layer.key_planes, whole),
            QuantSpecStates(value_states, positions, layer.value_planes, whole),
        )
