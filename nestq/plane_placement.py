"""Where planes of a model lie in memory: side by side if one kernel can read them at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestq.architectures import UnsupportedArchitectureError, describe
from nestq.four_bit_tensor import FourBitTensor
from nestq.neighbours import merged
from nestq.tensor import NestedQuantTensor
from nestq.tile_layout import TILE_ROWS

__all__ = ["merged", "place_side_by_side_"]


def place_side_by_side_(model: nn.Module) -> int:
    """Lay the planes of linears that read one input next to each other, in place.

    Those of query, key and value, and those of gate and up: each kind of plane, and the biases,
    move to one buffer a group, of which the parameters become views. Parameters stay the same
    objects with the same values. Needs room for one kind of plane of one group at a time.

    Moving a model to another device, or loading other tensors into it, takes planes apart again.
    Left alone are groups that no kernel can read at once: of linears that are not nested, nor of 4
    bits with INT8 activations, or not with the same options; whose rows, but for the last, do not
    end with a tile of 16; of which some only have a bias; and every group of a model whose
    structure is not known.

    Args:
        model: a causal language model, or ``torch.compile`` of one. CUDA graphs that were captured
            of it read the old places.

    Returns:
        Number of groups that were moved: 0 if all that can are side by side already.
    """
    try:
        architecture = describe(model)
    except UnsupportedArchitectureError:
        return 0
    moved = 0
    seen: set[int] = set()
    for index in range(len(architecture.layers)):
        for names in architecture.linear_groups:
            linears = [architecture.linear(index, name) for name in names]
            weights = {id(linear.weight) for linear in linears}
            # A weight that is several linears' own has one place only.
            if len(weights) == len(linears) > 1 and not weights & seen and _fit(linears):
                moved += _place(linears)
            seen |= weights
    return moved


def _fit(linears: Sequence[nn.Linear]) -> bool:
    """Whether one kernel can read the planes of all these linears if they are side by side."""
    weights: list[Any] = [linear.weight for linear in linears]
    if not all(map(_can_be_merged, weights)):
        return False
    in_tiles = weights[0].unit is not None
    if in_tiles and any(weight.shape[0] % TILE_ROWS for weight in weights[:-1]):
        return False
    return len({_format(linear) for linear in linears}) == 1


def _can_be_merged(weight: Tensor) -> bool:
    """Whether both views call the operator that kernels compute for several weights at once."""
    if isinstance(weight, FourBitTensor):
        return weight.draft_bits == weight.target_bits == 8 and not weight.input_rotation
    return isinstance(weight, NestedQuantTensor)


def _format(linear: nn.Linear) -> tuple[object, ...]:
    """What linears that one kernel computes have in common."""
    weight: Any = linear.weight
    bias = linear.bias
    names, attributes = weight.__tensor_flatten__()
    planes = [(name, getattr(weight, name)) for name in names]
    formats = tuple((name, plane.dtype, plane.device) for name, plane in planes)
    bias_format = None if bias is None else (bias.dtype, bias.device)
    options = weight.group_size, attributes.get("overlap"), weight.in_features
    return type(weight), options, formats, bias_format


def _place(linears: Sequence[nn.Linear]) -> bool:
    """Move what is not side by side yet; whether that was anything."""
    weights: list[Any] = [linear.weight for linear in linears]
    moved = False
    for name in weights[0].__tensor_flatten__()[0]:
        parts = _side_by_side([getattr(weight, name) for weight in weights])
        for weight, part in zip(weights, parts, strict=False):
            setattr(weight, name, part)
        moved |= bool(parts)
    if linears[0].bias is not None:
        parts = _side_by_side([linear.bias.detach() for linear in linears])
        for linear, part in zip(linears, parts, strict=False):
            linear.bias.data = part
        moved |= bool(parts)
    return moved


def _side_by_side(planes: list[Tensor]) -> Sequence[Tensor]:
    """Copies of planes as views of one buffer; nothing if they are neighbours already."""
    if merged(planes) is not None:
        return []
    # What was made in inference mode can be written in inference mode only.
    with torch.inference_mode(planes[0].is_inference()):
        return torch.cat(planes).split([plane.shape[0] for plane in planes])
