"""4-bit tensors to test with, and their arithmetic by hand."""

from typing import Any

import torch
from nested_tensors import parts, random
from torch import Tensor

from nestq.four_bit_tensor import FourBitTensor

# What the recipes read: draft_bits, target_bits and input_rotation.
KINDS: dict[str, dict[str, Any]] = {
    "quantspec": {"draft_bits": 16, "target_bits": None},
    "qspec": {"draft_bits": 4, "target_bits": 16, "input_rotation": 4},
    "w4a8": {"draft_bits": 8, "target_bits": 8},
    "w4a16": {"draft_bits": 16, "target_bits": 16},
}


def make(kind: str = "quantspec", rows: int = 24, columns: int = 100, **options: Any) -> Any:
    return FourBitTensor.from_hp(random(rows, columns), 32, **KINDS[kind], **options)


def assert_same(one: Any, other: Any) -> None:
    """The same contents, bit for bit, and the same attributes but for the dtype."""
    assert type(one) is type(other) is FourBitTensor
    assert one.shape == other.shape
    assert parts(one).keys() == parts(other).keys()
    for name, part in parts(one).items():
        theirs = parts(other)[name]
        assert torch.equal(part, theirs.to(part.dtype) if name == "dense" else theirs), name
    attributes = [tensor.__tensor_flatten__()[1] for tensor in (one, other)]
    for found in attributes:
        del found["hp_dtype"]
    assert attributes[0] == attributes[1]


def codes_by_hand(base: Tensor, group_size: int) -> Tensor:
    """Codes int64 ``[N, Kp]``: byte j of a group has code j below, and j + group_size / 2 above."""
    half = group_size // 2
    bytes_ = base.long().unflatten(1, (-1, half))
    nibbles = torch.cat((bytes_ % 16, bytes_ // 16), dim=-1).flatten(1)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def weight_by_hand(weight: FourBitTensor) -> Tensor:
    """Float64 ``q * s`` ``[N, K]`` of a weight in the order of files; rotated, if it is."""
    codes = codes_by_hand(weight.base, weight.group_size).double()
    scale = weight.scale.double()[:, :, None].expand(-1, -1, weight.group_size).flatten(1)
    return (codes * scale)[:, : weight.in_features]


def rotation_by_hand(columns: int, size: int) -> Tensor:
    """Float64 block-diagonal Hadamard matrix ``[K, K]``; the identity for size 0."""
    if size == 0:
        return torch.eye(columns, dtype=torch.float64)
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.block_diag(*[block * size**-0.5] * (columns // size))


def activations_by_hand(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int64 and float32 scale ``[M, 1]`` of 8 or 4 bits, rounded where the formula rounds."""
    levels, share = {8: (127, 1.0), 4: (7, 0.9)}[bits]
    share = torch.tensor(share, dtype=torch.float32)
    scale = x.float().abs().amax(-1, keepdim=True) * share / torch.tensor(float(levels))
    codes = (x.float() * (1 / scale)).round().clamp(-levels, levels)
    return codes.long(), scale
