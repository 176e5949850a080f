"""``TiledQuantTensor``: a nested weight in the order in which GPU kernels read it."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from nestq.reference.weights import fixed_point_scale
from nestq.tensor import NestedQuantTensor, row_view, slice_arguments
from nestq.tensor_checks import check_float_dtype, check_one_device, check_options, check_scale
from nestq.tile_layout import (
    BLOCK,
    TILE_BYTES,
    TILE_ROWS,
    canonical_planes,
    tile_plane,
    tile_scale,
)


class TiledQuantTensor(NestedQuantTensor):
    """A ``NestedQuantTensor`` whose planes lie in tiles: what a nested weight becomes on a GPU.

    Codes and scales are the same, and moving to a CPU, saving and ``canonical`` put them back in
    the order of files.

    Tensor data:
        base: uint8 ``[ceil(N / 16), blocks, 512]``, blocks of 64 columns (``nestq.tile_layout``).
        scale: int16 ``[ceil(N / 16), G, 16]``, in units of their row.
        unit: float32 ``[N]``, a power of two for each row.
        refinement: as base; None if only the draft is loaded.

    Attributes:
        scale_dtype: floating-point dtype of the scales in canonical order.

    Other attributes are those of ``NestedQuantTensor``. Slices of rows alias the planes of the
    whole and start at a multiple of 16.
    """

    tensor_data_names = ["base", "scale", "unit"]
    tensor_attribute_names = ["group_size", "overlap", "in_features", "hp_dtype", "scale_dtype"]
    optional_tensor_data_names = ["refinement"]

    unit: Tensor
    scale_dtype: torch.dtype

    @staticmethod
    def __new__(  # type: ignore[override]
        cls: type[Self],
        base: Tensor,
        scale: Tensor,
        unit: Tensor,
        group_size: int,
        overlap: int,
        in_features: int,
        hp_dtype: torch.dtype,
        scale_dtype: torch.dtype,
        refinement: Tensor | None = None,
    ) -> Self:
        check_tiles(base, scale, unit, group_size, overlap, in_features, refinement)
        check_float_dtype("hp_dtype", hp_dtype)
        check_float_dtype("scale_dtype", scale_dtype)
        self = torch.Tensor._make_wrapper_subclass(
            cls, (unit.shape[0], in_features), dtype=hp_dtype, device=base.device
        )
        self.base = base
        self.scale = scale
        self.unit = unit
        self.refinement = refinement
        self.group_size = group_size
        self.overlap = overlap
        self.in_features = in_features
        self.hp_dtype = hp_dtype
        self.scale_dtype = scale_dtype
        return self

    @classmethod
    def from_canonical(cls, weight: NestedQuantTensor) -> "TiledQuantTensor":
        """The same weight in tiles, on the same device.

        Raises:
            ValueError: tiles would change a scale (:func:`nestq.tensor_checks.check_scale`).
        """
        check_scale("scale", weight.scale)
        codes, unit = fixed_point_scale(weight.scale)
        refinement = weight.refinement
        return cls(
            tile_plane(weight.base, weight.group_size),
            tile_scale(codes),
            unit,
            weight.group_size,
            weight.overlap,
            weight.in_features,
            weight.hp_dtype,
            weight.scale.dtype,
            None if refinement is None else tile_plane(refinement, weight.group_size),
        )

    @classmethod
    def in_own_order(cls, weight: NestedQuantTensor) -> NestedQuantTensor:
        """A weight in tiles, on the same device."""
        return weight if isinstance(weight, cls) else cls.from_canonical(weight)

    def stored_scale_dtype(self) -> torch.dtype:
        """Dtype of the scales in files."""
        return self.scale_dtype

    def canonical(self) -> NestedQuantTensor:
        """The same weight in the order of files, on the same device."""
        base, refinement, scale = canonical_planes(
            self.base, self.refinement, self.scale, self.unit, self.group_size
        )
        return NestedQuantTensor(
            base,
            scale.to(self.scale_dtype),
            self.group_size,
            self.overlap,
            self.in_features,
            self.hp_dtype,
            refinement,
        )

    def dequantize(self, view: str = "target", dtype: torch.dtype | None = None) -> Tensor:
        """Dense weight ``[N, K]`` of a view, in ``dtype`` (default: the tensor's own)."""
        return self.canonical().dequantize(view, dtype)


def check_tiles(
    base: Tensor,
    scale: Tensor,
    unit: Tensor,
    group_size: int,
    overlap: int,
    in_features: int,
    refinement: Tensor | None,
) -> None:
    """Refuse planes in tiles, scales and options that do not belong together, by name."""
    check_options(group_size, overlap)
    groups = -(-in_features // group_size)
    tiles, blocks = -(-unit.shape[0] // TILE_ROWS), -(-groups * group_size // BLOCK)
    expected = {
        "base": (base, torch.uint8, (tiles, blocks, TILE_BYTES)),
        "scale": (scale, torch.int16, (tiles, groups, TILE_ROWS)),
        "unit": (unit, torch.float32, (unit.shape[0],)),
    }
    if refinement is not None:
        expected["refinement"] = (refinement, torch.uint8, (tiles, blocks, TILE_BYTES))
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must be {dtype} of shape {shape} for {unit.shape[0]} rows and "
                f"{in_features} columns in groups of {group_size}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    check_one_device({name: tensor for name, (tensor, _, _) in expected.items()})


aten = torch.ops.aten


@TiledQuantTensor.implements(aten.slice.Tensor)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    self, dim, start, end, step = slice_arguments(*args, **kwargs)
    if dim not in (0, -2) or step != 1:
        raise NotImplementedError(
            "TiledQuantTensor can be sliced along rows (dim 0) with step 1 only, "
            f"got dim {dim}, step {step}"
        )
    return row_view(func, args, kwargs, cut_at_tiles(self.shape[0], start, end))


def cut_at_tiles(rows: int, start: int | None, end: int | None) -> Callable[[Tensor], Tensor]:
    """What cuts rows out of the planes, scales and units of a weight in tiles.

    Args:
        rows: of the weight.
        start: first row of the cut, as in a slice.
        end: the one after its last row.

    Raises:
        NotImplementedError: a tile would be cut through.
    """
    first, last, _ = slice(start, end).indices(rows)
    if last <= first:
        first = last = 0  # no row: it does not matter where
    if first % TILE_ROWS or (last % TILE_ROWS and last != rows):
        raise NotImplementedError(
            f"rows of a weight in tiles can be cut at multiples of {TILE_ROWS} only, "
            f"got rows {first} to {last}"
        )

    def cut(tensor: Tensor) -> Tensor:
        unit = TILE_ROWS if tensor.dim() == 3 else 1
        return aten.slice.Tensor(tensor, 0, first // unit, -(-last // unit), 1)

    return cut


torch.serialization.add_safe_globals([TiledQuantTensor])
