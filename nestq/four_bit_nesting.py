"""Quantize single linears to one 4-bit weight: base, report, and the tensor that holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nestq.architectures import Architecture
from nestq.four_bit_recipe import FourBitRecipe
from nestq.four_bit_tensor import FourBitTensor, rotate_input
from nestq.gptq import Factor, factorize
from nestq.nesting import (
    CODES_DEVICE,
    NestedCodes,
    float_weight,
    gptq_base,
    nearest_base,
    relative_error,
)
from nestq.reference import weights as reference
from nestq.report import LinearReport

# Blocks of a rotation, at most: what a warp transforms in its registers.
LARGEST_ROTATION = 512


def input_rotations(recipe: FourBitRecipe, architecture: Architecture | None) -> dict[str, int]:
    """Size of the rotation of a linear's input, by its name, for the linears that have one.

    Raises:
        ValueError: the recipe wants rotations, and the model's parts are unknown or of odd size.
    """
    if not recipe.rotate_down:
        return {}
    if architecture is None:
        raise ValueError(
            "rotate_down must be False for a model whose structure is not known: it does not say "
            "which linear is the MLP's output"
        )
    sizes = {}
    for index in range(len(architecture.layers)):
        output = architecture.family.mlp_output
        name = f"{architecture.layer_name(index)}.{output}"
        features = architecture.linear(index, output).in_features
        if features % 2:
            raise ValueError(f"rotate_down must be False: {name} has {features} input features")
        sizes[name] = min(features & -features, LARGEST_ROTATION)
    return sizes


@dataclass
class FourBitNester:
    """Quantizes groups of linears; made for :func:`nestq.calibration.sweep_layers`.

    Attributes:
        recipe: how.
        rotations: of :func:`input_rotations`.
        codes: what came out, by name of the linear, on ``CODES_DEVICE``.
        reports: of the linears.
    """

    recipe: FourBitRecipe
    rotations: Mapping[str, int]
    codes: dict[str, NestedCodes] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)

    def base(
        self, names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor
    ) -> list[Tensor]:
        """Make the bases of linears that read one input, by GPTQ; they then compute with them."""
        size = self.rotations.get(names[0], 0)
        # Of the rotated input: R^T H R.
        hessian = rotate_input(rotate_input(hessian, size).T, size)
        factor = factorize(hessian, self.recipe.damping, names[0])
        computing = []
        for name, linear in zip(names, linears, strict=True):
            weight = rotate_input(float_weight(linear, hessian.device), size)
            codes = gptq_base(name, weight, factor, self.recipe)
            dense = codes.dense(self.recipe.group_size, 1)
            self._report(name, dense, weight, factor, hessian)
            computing.append(rotate_input(dense, size))
            self.codes[name] = codes.to(CODES_DEVICE)
        return computing

    def round_to_nearest(
        self, name: str, linear: nn.Linear, device: torch.device | None = None
    ) -> None:
        """Quantize a linear without calibration, on a device (default: its own)."""
        weight = rotate_input(float_weight(linear, device), self.rotations.get(name, 0))
        codes = nearest_base(name, weight, self.recipe)
        self._report(name, codes.dense(self.recipe.group_size, 1), weight, None, None)
        self.codes[name] = codes.to(CODES_DEVICE)

    def _report(
        self,
        name: str,
        dense: Tensor,
        weight: Tensor,
        factor: Factor | None,
        hessian: Tensor | None,
    ) -> None:
        error = relative_error(dense, weight, hessian)
        self.reports.append(
            LinearReport(
                name=name,
                shape=(weight.shape[0], weight.shape[1]),
                draft_error=error,
                target_error=0.0 if self.recipe.target_bits is None else error,
                saturation=0.0,
                damping=None if factor is None else factor.damping,
                dead_columns=0 if factor is None else factor.dead_columns,
            )
        )

    def install(self, linears: Mapping[str, nn.Linear]) -> None:
        """Give linears their 4-bit weights, and use up the codes."""
        recipe = self.recipe
        for name, linear in linears.items():
            weight = linear.weight.detach()
            codes = self.codes.pop(name).to(weight.device)
            tensor = FourBitTensor.from_codes(
                reference.pad_to_groups(codes.base, recipe.group_size),
                codes.scale,
                weight if recipe.target_bits is None else None,
                group_size=recipe.group_size,
                in_features=weight.shape[1],
                hp_dtype=weight.dtype,
                draft_bits=recipe.draft_bits,
                target_bits=recipe.target_bits,
                input_rotation=self.rotations.get(name, 0),
            )
            linear.weight = nn.Parameter(tensor, requires_grad=False)
