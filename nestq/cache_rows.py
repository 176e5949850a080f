"""What transformers asks of any cache, for caches that are tensors with a dimension of rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

KERNEL_DTYPES = (torch.float16, torch.bfloat16)


class PositionedLayer(CacheLayerMixin):
    """A preallocated layer that is written and read at positions, which its cache knows."""

    is_sliding = False
    capacity: int
    device: torch.device

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors exist from construction on."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys; attention masks by position."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: ``lengths`` of the cache says how many positions are valid."""
        return 0

    def get_max_length(self) -> int:
        """Positions that the tensors hold."""
        return self.capacity

    def reset(self) -> None:
        """Nothing to do: what is read was written at earlier positions of the same sequence."""

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i what row ``beam_idx[i]`` was, in the same memory."""
        self._replace(lambda one: one.copy_(one.index_select(0, beam_idx.to(one.device))))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._replace(lambda one: one.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._replace(lambda one: one[indices.to(one.device)])

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._replace(lambda one: one.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back to the device of the layer."""
        self._replace(lambda one: one.to(self.device, non_blocking=True))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it."""
        raise NotImplementedError


class PositionedCache(Cache):
    """A cache of such layers.

    Attributes:
        lengths: int64 ``[batch_size]`` on the device, verified positions of each row.
    """

    lengths: Tensor

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


def check_kernel_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse dense keys and values in a dtype that attention does not read."""
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating point dtype, got {dtype}")
    if device.type == "cuda" and dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"dtype must be one of {KERNEL_DTYPES} on a GPU, where kernels read dense keys and "
            f"values in 16 bits, got {dtype}"
        )
