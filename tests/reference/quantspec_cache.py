"""A QuantSpec cache of random keys and values to test with."""

from typing import NamedTuple

import torch
from nested_kv import random
from torch import Tensor

from nestq.reference.kv_quantspec import (
    GROUP,
    dequantize_keys,
    dequantize_values,
    first_recent,
    quantize_keys,
    quantize_values,
    write_recent,
)


class Cache(NamedTuple):
    """Planes and buffers of some tokens ``[B, H_kv, T, D]``."""

    keys: tuple[Tensor, Tensor | None, Tensor, Tensor]
    values: tuple[Tensor, Tensor | None, Tensor, Tensor]
    recent_keys: Tensor
    recent_values: Tensor

    @staticmethod
    def of(keys: Tensor, values: Tensor, positions: Tensor, slots: int) -> "Cache":
        """What a cache holds after the last position of each row; NaN where it holds nothing.

        Groups are quantized once they are full, also those that are still read from the buffer.
        """
        batch, heads, tokens, head_dim = keys.shape
        lengths = positions.amax(1) + 1
        groups = -(-tokens // GROUP)
        missing = groups * GROUP - tokens
        planes = []
        for states, quantize in ((keys, quantize_keys), (values, quantize_values)):
            states = torch.cat((states, states.new_zeros(batch, heads, missing, head_dim)), 2)
            # Group g of row b is full when its last token is known.
            end = (lengths // GROUP * GROUP)[:, None, None, None]
            states = states.masked_fill(torch.arange(groups * GROUP)[:, None] >= end, torch.nan)
            planes.append(quantize(states))
        buffers = []
        for states in (keys, values):
            buffer = torch.full((batch, heads, slots, head_dim), torch.nan, dtype=states.dtype)
            for start in range(0, tokens, slots):
                block = torch.arange(start, min(start + slots, tokens)).repeat(batch, 1)
                write_recent(
                    states[:, :, start : start + slots],
                    block.masked_fill(block >= lengths[:, None], -1),
                    buffer,
                )
            buffers.append(buffer)
        return Cache(*planes, *buffers)

    def rows(self, index: slice) -> "Cache":
        """Some rows of the batch."""
        keys, values = (
            tuple(None if plane is None else plane[index] for plane in planes)
            for planes in (self.keys, self.values)
        )
        return Cache(keys, values, self.recent_keys[index], self.recent_values[index])

    def draft(self) -> "Cache":
        """What is read without the lower nibbles."""
        keys, values = ((base, None, *rest) for base, _, *rest in (self.keys, self.values))
        return self._replace(keys=keys, values=values)

    def arguments(self) -> tuple[Tensor | None, ...]:
        """In the order of the attention's parameters."""
        return *self.keys, *self.values, self.recent_keys, self.recent_values


def visible(position: int, window: int) -> tuple[list[int], list[int]]:
    """Quantized and recent tokens that the query at a position sees."""
    first = max(0, position - window + 1) if window else 0
    split = int(first_recent(torch.tensor(position)))
    tokens = range(first, position + 1)
    return [t for t in tokens if t < split], [t for t in tokens if t >= split]


def read(cache: Cache, position: int, window: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H_kv, t, D]`` in float64 that the query at a position sees."""
    old, recent = visible(position, window)
    slots = [token % cache.recent_keys.shape[2] for token in recent]
    keys = dequantize_keys(*cache.keys, torch.float64)[:, :, old]
    values = dequantize_values(*cache.values, torch.float64)[:, :, old]
    return (
        torch.cat((keys, cache.recent_keys[:, :, slots].double()), 2),
        torch.cat((values, cache.recent_values[:, :, slots].double()), 2),
    )


def plain_attention(
    query: Tensor, positions: Tensor, cache: Cache, scaling: float, window: int = 0
) -> Tensor:
    """Softmax attention in float64, a row at a time."""
    batch, heads, count, _ = query.shape
    group = heads // cache.recent_keys.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(batch):
        for i in range(count):
            if positions[b, i] < 0:
                continue
            keys, values = read(cache.rows(slice(b, b + 1)), int(positions[b, i]), window)
            keys, values = (x[0].repeat_interleave(group, 0) for x in (keys, values))
            scores = (keys @ query[b, :, i, :, None].double()).squeeze(-1) * scaling
            out[b, :, i] = (scores.softmax(-1).unsqueeze(-2) @ values).squeeze(-2)
    return out


def random_cache(
    heads: int, head_dim: int, positions: Tensor, slots: int, tokens: int = 0, seed: int = 0
) -> Cache:
    """Keys with channels of different sizes and centers, and values with different centers."""
    tokens = tokens or int(positions.max()) + 1
    shape = positions.shape[0], heads, tokens, head_dim
    keys = random(*shape, seed=seed) + random(heads, 1, head_dim, seed=seed + 1)
    keys = keys * (random(heads, 1, head_dim, seed=seed + 2) / 2).exp()
    values = random(*shape, seed=seed + 3) + random(*shape[:3], 1, seed=seed + 4)
    return Cache.of(keys.half(), values.half(), positions, slots)
