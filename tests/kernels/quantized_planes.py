"""Operands of the linear kernels, in canonical form and in tiles."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nestq.reference.linear import nested_linear
from nestq.reference.weights import fixed_point_scale, pack_base, pack_refinement
from nestq.tile_layout import tile_plane, tile_scale


@dataclass
class Planes:
    """A random nested weight ``[N, K]``, with codes at both ends of their ranges."""

    base: Tensor
    refinement: Tensor
    scale: Tensor
    columns: int
    group_size: int
    overlap: int

    @staticmethod
    def random(rows: int, columns: int, group_size: int, overlap: int) -> "Planes":
        padded = -(-columns // group_size) * group_size
        base = torch.randint(-8, 8, (rows, padded), dtype=torch.int8)
        # With an overlap of 16 a refinement below 0 would leave int8 at the base code -8.
        refinement = torch.randint(-8 if overlap < 16 else 0, 8, (rows, padded), dtype=torch.int8)
        scale = (torch.rand(rows, padded // group_size) + 0.05).bfloat16()
        scale[0] = 0
        return Planes(
            pack_base(base, group_size),
            pack_refinement(refinement, group_size),
            scale,
            columns,
            group_size,
            overlap,
        )

    def linear(self, x: Tensor, bias: Tensor | None, view: str) -> Tensor:
        """The reference's result."""
        refinement = self.refinement if view == "target" else None
        return nested_linear(
            x, self.base, refinement, self.scale, bias, self.group_size, self.overlap
        )

    def tiles(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Base, refinement, scale codes and unit as the kernels read them."""
        codes, unit = fixed_point_scale(self.scale)
        base, refinement = (tile_plane(p, self.group_size) for p in (self.base, self.refinement))
        return (
            base.to(device),
            refinement.to(device),
            tile_scale(codes).to(device),
            unit.to(device),
        )
