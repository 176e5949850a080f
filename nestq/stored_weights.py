"""Quantized weights as the plain tensors that store them, and back: see ``checkpoint_format``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from nestq.checkpoint_format import PARTS, Planes, TargetPart, plane_tensors
from nestq.four_bit_tensor import FourBitTensor
from nestq.tensor import NestedQuantTensor
from nestq.tensor_checks import check_four_bit_options

QuantizedWeight = NestedQuantTensor | FourBitTensor


@dataclass(frozen=True)
class FourBitFormat:
    """What ``quantization_config.four_bit`` says of a model whose weights are ``FourBitTensor``.

    Attributes:
        draft_bits: of the draft's activations.
        target_bits: of the target's; None where it reads dense weights.
        input_rotation: size of the input's rotation, by name of the modules that have one.
        tied_head: whether the head's dense weight is the embedding's, and not stored again.

    Raises:
        ValueError: an entry is off.
    """

    draft_bits: int
    target_bits: int | None
    input_rotation: dict[str, int] = field(default_factory=dict)
    tied_head: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.input_rotation, dict):
            raise ValueError(f"input_rotation must be an object, got {self.input_rotation!r}")
        for size in self.input_rotation.values() or (0,):
            # Any number of features that the size divides will do: weights check theirs.
            features = size if isinstance(size, int) else 0
            check_four_bit_options(32, features, self.draft_bits, self.target_bits, size)
        if not isinstance(self.tied_head, bool):
            raise ValueError(f"tied_head must be a bool, got {self.tied_head!r}")

    @property
    def target_part(self) -> TargetPart | None:
        """The stored tensor that a target reads besides base and scale."""
        return "dense" if self.target_bits is None else None


class JoinPlanes(ConversionOps):
    """Make a quantized weight of the tensors that store it."""

    def __init__(self, group_size: int, overlap: int, four_bit: FourBitFormat | None) -> None:
        self.group_size = group_size
        self.overlap = overlap
        self.four_bit = four_bit

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The weight, by its name in the model."""
        parts = {
            part: input_dict[_source_pattern(part)][0]
            for part in PARTS
            if _source_pattern(part) in input_dict
        }
        name = kwargs["full_layer_name"]
        skeleton = kwargs["model"].get_parameter(name)
        weight = self._join(parts, name.removesuffix(".weight"), skeleton)
        return {name: nn.Parameter(weight.in_order_of_device(), requires_grad=False)}

    def _join(self, parts: dict[str, Tensor], module: str, skeleton: Tensor) -> QuantizedWeight:
        base, scale, columns = parts["base"], parts["scale"], skeleton.shape[1]
        if self.four_bit is None:
            return NestedQuantTensor(
                base,
                scale,
                self.group_size,
                self.overlap,
                columns,
                skeleton.dtype,
                parts.get("refinement"),
            )
        dense = parts.get("dense")
        return FourBitTensor(
            base,
            scale,
            self.group_size,
            columns,
            skeleton.dtype,
            scale.dtype,
            self.four_bit.draft_bits,
            self.four_bit.target_bits,
            self.four_bit.input_rotation.get(module, 0),
            dense=None if dense is None else dense.to(skeleton.dtype),
        )


def joining_rule(
    planes: Planes,
    target_part: TargetPart | None,
    group_size: int,
    overlap: int,
    four_bit: FourBitFormat | None,
) -> WeightConverter:
    """The rule by which transformers makes quantized weights of what it loads."""
    sources = [_source_pattern(part) for part in plane_tensors(planes, target_part)]
    return WeightConverter(sources, ".weight", [JoinPlanes(group_size, overlap, four_bit)])


def _source_pattern(part: str) -> str:
    return rf"\.weight\.{part}$"


def joins_planes(rule: Any) -> bool:
    """Whether a rule of loading is ours."""
    return any(isinstance(op, JoinPlanes) for op in getattr(rule, "operations", ()))


def plain_tensors(state_dict: Mapping[str, Tensor], tied: str | None) -> dict[str, Tensor]:
    """A state dict in which every quantized weight is the tensors that store it.

    Args:
        state_dict: of a model.
        tied: module whose dense weight is left out.
    """
    plain: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, QuantizedWeight):
            plain[name] = tensor
            continue
        stored = tensor.canonical()
        for part in stored.__tensor_flatten__()[0]:
            if not (part == "dense" and name == f"{tied}.weight"):
                plain[f"{name}.{part}"] = getattr(stored, part)
    return plain
