"""Nest single linears: base, refinement, report, and the tensor that holds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from nestq.gptq import Factor, factorize, quantize_base, quantize_refinement, search_scale
from nestq.recipes import NestedRecipe
from nestq.reference import weights as reference
from nestq.report import LinearReport
from nestq.tensor import NestedQuantTensor

# Where codes wait: the compute device need only hold what is being nested.
CODES_DEVICE = torch.device("cpu")


@dataclass
class NestedCodes:
    """Codes of one linear while it is being nested; not yet padded or packed.

    Attributes:
        base: int8 ``[N, K]``.
        scale: ``[N, G]``, in its storage dtype.
        refinement: int8 ``[N, K]``, once it is known.
    """

    base: Tensor
    scale: Tensor
    refinement: Tensor | None = None

    def to(self, device: torch.device) -> "NestedCodes":
        """The same codes on a device."""
        refinement = None if self.refinement is None else self.refinement.to(device)
        return NestedCodes(self.base.to(device), self.scale.to(device), refinement)

    def dense(self, group_size: int, overlap: int) -> Tensor:
        """Float32 weight ``[N, K]``: the target's if the refinement is known, else the draft's."""
        scale = reference.expand_scale(self.scale.float(), group_size)[:, : self.base.shape[1]]
        if self.refinement is None:
            return self.base * scale
        return reference.compose(self.base, self.refinement, overlap) * scale / overlap


@dataclass
class Nester:
    """Nests groups of linears; made for :func:`nestq.calibration.sweep_layers`.

    Attributes:
        recipe: how.
        codes: what came out, by name of the linear, on ``CODES_DEVICE``.
        reports: of the linears whose refinement is done.
    """

    recipe: NestedRecipe
    codes: dict[str, NestedCodes] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)

    def base(
        self, names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor
    ) -> list[Tensor]:
        """Make the bases of linears that read one input; they then compute as drafts."""
        factor = factorize(hessian, self.recipe.damping, names[0])
        drafts = []
        for name, linear in zip(names, linears, strict=True):
            codes = gptq_base(name, float_weight(linear, hessian.device), factor, self.recipe)
            drafts.append(self._dense(codes))
            self.codes[name] = codes.to(CODES_DEVICE)
        return drafts

    def refinement(
        self, names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor
    ) -> list[Tensor]:
        """Refine bases that are there already; the linears then compute as targets."""
        factor = factorize(hessian, self.recipe.damping, names[0])
        targets = []
        for name, linear in zip(names, linears, strict=True):
            codes = self.codes[name].to(hessian.device)
            self._refine(name, linear, codes, factor, hessian)
            targets.append(self._dense(codes))
            self.codes[name] = codes.to(CODES_DEVICE)
        return targets

    def base_and_refinement(
        self, names: Sequence[str], linears: Sequence[nn.Linear], hessian: Tensor
    ) -> list[Tensor]:
        """Do both on one Hessian; the linears then compute as drafts."""
        factor = factorize(hessian, self.recipe.damping, names[0])
        drafts = []
        for name, linear in zip(names, linears, strict=True):
            codes = gptq_base(name, float_weight(linear, hessian.device), factor, self.recipe)
            drafts.append(self._dense(codes))
            self._refine(name, linear, codes, factor, hessian)
            self.codes[name] = codes.to(CODES_DEVICE)
        return drafts

    def round_to_nearest(
        self, name: str, linear: nn.Linear, device: torch.device | None = None
    ) -> None:
        """Nest a linear without calibration, on a device (default: its own), in closed form."""
        weight = float_weight(linear, device)
        codes = nearest_base(name, weight, self.recipe)
        codes.refinement, saturation = self._closed_form(weight, codes)
        self._report(name, weight, codes, saturation, None, None)
        self.codes[name] = codes.to(CODES_DEVICE)

    def _dense(self, codes: NestedCodes) -> Tensor:
        return codes.dense(self.recipe.group_size, self.recipe.target_overlap)

    def _refine(
        self, name: str, linear: nn.Linear, codes: NestedCodes, factor: Factor, hessian: Tensor
    ) -> None:
        weight = float_weight(linear, factor.upper.device)
        if self.recipe.refinement == "closed_form":
            codes.refinement, saturation = self._closed_form(weight, codes)
        else:
            codes.refinement, saturation = quantize_refinement(
                weight,
                codes.base,
                factor,
                codes.scale,
                self.recipe.group_size,
                self.recipe.target_overlap,
            )
        self._report(name, weight, codes, saturation, factor, hessian)

    def _closed_form(self, weight: Tensor, codes: NestedCodes) -> tuple[Tensor, float]:
        group_size = self.recipe.group_size
        refinement, clipped = reference.refine(
            reference.pad_to_groups(weight, group_size),
            reference.pad_to_groups(codes.base, group_size),
            codes.scale,
            group_size,
            self.recipe.target_overlap,
        )
        columns = weight.shape[1]
        return refinement[:, :columns], clipped[:, :columns].float().mean().item()

    def _report(
        self,
        name: str,
        weight: Tensor,
        codes: NestedCodes,
        saturation: float,
        factor: Factor | None,
        hessian: Tensor | None,
    ) -> None:
        draft = self._dense(NestedCodes(codes.base, codes.scale))
        self.reports.append(
            LinearReport(
                name=name,
                shape=(weight.shape[0], weight.shape[1]),
                draft_error=relative_error(draft, weight, hessian),
                target_error=relative_error(self._dense(codes), weight, hessian),
                saturation=saturation,
                damping=None if factor is None else factor.damping,
                dead_columns=0 if factor is None else factor.dead_columns,
            )
        )


class BaseOptions(Protocol):
    """What a recipe says of bases."""

    @property
    def group_size(self) -> int: ...
    @property
    def torch_scale_dtype(self) -> torch.dtype: ...


def gptq_base(name: str, weight: Tensor, factor: Factor, recipe: BaseOptions) -> NestedCodes:
    """The base of a float32 weight ``[N, K]`` by GPTQ.

    Args:
        name: of the linear, for the error.
        weight: on the factor's device.
        factor: of the Hessian of the K inputs.
        recipe: for the groups and the storage of scales.

    Raises:
        ValueError: the scales overflow their storage.
    """
    group_size = recipe.group_size
    scale = search_scale(
        reference.pad_to_groups(weight, group_size),
        group_size,
        recipe.torch_scale_dtype,
        reference.pad_to_groups(factor.diagonal, group_size),
    )
    _check_scale(name, scale)
    return NestedCodes(quantize_base(weight, factor, scale, group_size), scale)


def nearest_base(name: str, weight: Tensor, recipe: BaseOptions) -> NestedCodes:
    """The base of a float32 weight ``[N, K]``, rounded to nearest; as :func:`gptq_base`."""
    padded = reference.pad_to_groups(weight, recipe.group_size)
    scale = search_scale(padded, recipe.group_size, recipe.torch_scale_dtype)
    _check_scale(name, scale)
    base = reference.round_to_base(padded, scale, recipe.group_size)
    return NestedCodes(base[:, : weight.shape[1]], scale)


def _check_scale(name: str, scale: Tensor) -> None:
    if not torch.isfinite(scale).all():
        raise ValueError(f"scale_dtype: {scale.dtype} cannot hold the scales of {name}")


def float_weight(linear: nn.Linear, device: torch.device | None = None) -> Tensor:
    """A dense weight in float32, on a device (default: its own)."""
    return linear.weight.detach().to(device=device, dtype=torch.float32)


def relative_error(approximation: Tensor, weight: Tensor, hessian: Tensor | None) -> float:
    """``||X (approximation - weight)^T|| / ||X weight^T||`` for inputs with this Hessian."""

    def squared(matrix: Tensor) -> Tensor:
        transformed = matrix if hessian is None else matrix @ hessian
        return (transformed * matrix).sum().clamp(min=0)

    signal = squared(weight).sqrt().item()
    return squared(approximation - weight).sqrt().item() / signal if signal else 0.0


def install(
    linears: Mapping[str, nn.Linear], codes: dict[str, NestedCodes], recipe: NestedRecipe
) -> None:
    """Give linears their nested weights, and use up the codes."""
    for name, linear in linears.items():
        nested = codes.pop(name)
        assert nested.refinement is not None
        weight = linear.weight
        tensor = NestedQuantTensor.from_codes(
            reference.pad_to_groups(nested.base, recipe.group_size),
            reference.pad_to_groups(nested.refinement, recipe.group_size),
            nested.scale,
            group_size=recipe.group_size,
            overlap=recipe.target_overlap,
            in_features=weight.shape[1],
            hp_dtype=weight.dtype,
        )
        linear.weight = nn.Parameter(tensor.to(weight.device), requires_grad=False)
