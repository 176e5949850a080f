"""Random nested keys and values to test with."""

from typing import NamedTuple

import torch
from torch import Tensor

from nestq.reference.kv import quantize_kv


class Planes(NamedTuple):
    """Base, refinement and scale of keys or values ``[B, H_kv, S, ...]``."""

    base: Tensor
    refinement: Tensor
    scale: Tensor

    def rows(self, index: slice) -> "Planes":
        """Some rows of the batch."""
        return Planes(*(plane[index] for plane in self))

    def draft(self) -> tuple[Tensor, None, Tensor]:
        """What is read without a refinement."""
        return self.base, None, self.scale


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planes(*shape: int, seed: int = 0) -> Planes:
    """Nested random vectors ``[B, H_kv, S, D]`` whose lengths differ."""
    states = random(*shape, seed=seed)
    return Planes(*quantize_kv(states * random(*shape[:-1], 1, seed=seed + 1).exp()))


def poisoned(batch: int, heads: int, slots: int, head_dim: int, seed: int = 0) -> Planes:
    """Random bytes under scales of NaN: reading one slot of it shows in every result."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch, heads, slots, head_dim // 2
    base = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    refinement = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return Planes(base, refinement, torch.full(shape[:-1], torch.nan))


def assert_same_bytes(one: Planes, other: Planes) -> None:
    for name, ours, theirs in zip(Planes._fields, one, other, strict=True):
        assert ours.shape == theirs.shape, name
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
