"""Recipes: how a model is nested, and what is compared with it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torchao.core.config import AOBaseConfig

from nestq.argument_checks import check_int
from nestq.kv_policy import KVPolicy
from nestq.tensor_checks import check_options

RefinementKind = Literal["compensated", "closed_form"]
RotationChoice = Literal["orthogonal", "hadamard", "none"]

SCALE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_PAPER_OVERLAP = 16
_DEFAULT_OVERLAP = 8
MAX_SEED = (1 << 64) - 1  # of torch.Generator


@dataclass(frozen=True, kw_only=True)
class NestedRecipe(AOBaseConfig):
    """W4 draft nested in a W8 target, INT8 activations in both (BitNest paper, section 3).

    Attributes:
        group_size: weights that share a scale: 32, 64 or 128.
        refinement: ``"compensated"``: a second GPTQ pass over the refinement codes.
            ``"closed_form"``: the paper's equations 7 to 9.
        overlap: target steps in a base step, 1 to 16; None means 8 for ``"compensated"`` and the
            paper's 16 for ``"closed_form"``.
        rotation: kind of R1 and R2 (see ``nestq.rotation``), or ``"none"``.
        quantize_head: nest the output head too. It is read gamma + 1 times a round.
        damping: fraction of the Hessian's mean diagonal that GPTQ adds to it, above 0, at most 1.
        tuning_steps: gradient steps that tune the base against the 16-bit model's logits, end to
            end; 0 for none. Needs calibration.
        tune_codes: tune the base's codes too, not its scales alone. Takes 12 more bytes a weight
            while it tunes.
        scale_dtype: storage of scales: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        seed: of the rotation and of the order of tuning batches, 0 to 2^64 - 1.
        kv: the model's default KV policy (:meth:`nestq.KVPolicy.parse`).
    """

    group_size: int = 64
    refinement: RefinementKind = "compensated"
    overlap: int | None = None
    rotation: RotationChoice = "orthogonal"
    quantize_head: bool = True
    damping: float = 0.01
    tuning_steps: int = 0
    tune_codes: bool = False
    scale_dtype: str = "bfloat16"
    seed: int = 0
    kv: str = "kv8/kv8"

    def __post_init__(self) -> None:
        check_choice("refinement", self.refinement, get_args(RefinementKind))
        check_choice("rotation", self.rotation, get_args(RotationChoice))
        check_choice("scale_dtype", self.scale_dtype, tuple(SCALE_DTYPES))
        if self.overlap is None:
            closed = self.refinement == "closed_form"
            object.__setattr__(self, "overlap", _PAPER_OVERLAP if closed else _DEFAULT_OVERLAP)
        check_options(self.group_size, self.target_overlap)
        check_damping(self.damping)
        for name in ("quantize_head", "tune_codes"):
            check_bool(name, getattr(self, name))
        check_int("tuning_steps", self.tuning_steps, 0)
        if self.tune_codes and not self.tuning_steps:
            raise ValueError("tune_codes needs tuning_steps of at least 1, got 0")
        check_int("seed", self.seed, 0, MAX_SEED)
        check_kv(self.kv)

    @property
    def target_overlap(self) -> int:
        """``overlap`` as an int: the default is filled in when the recipe is made."""
        assert self.overlap is not None
        return self.overlap

    @property
    def torch_scale_dtype(self) -> torch.dtype:
        """``scale_dtype`` as a torch dtype."""
        return SCALE_DTYPES[self.scale_dtype]

    def to_dict(self) -> dict[str, Any]:
        """Options as plain JSON values."""
        return {"name": "bitnest_w4w8", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class W8A8Recipe:
    """Plain W8A8 for comparison: the same rotation, round to nearest, no nesting, no draft.

    Attributes:
        rotation: kind of R1 and R2, or ``"none"``.
        quantize_head: quantize the output head too.
        seed: of the rotation.
    """

    rotation: RotationChoice = "orthogonal"
    quantize_head: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("rotation", self.rotation, get_args(RotationChoice))
        check_bool("quantize_head", self.quantize_head)
        check_int("seed", self.seed, 0, MAX_SEED)


def bitnest_w4w8(**options: Any) -> NestedRecipe:
    """The BitNest recipe: W4A8 drafts, W8A8 target. Options: see :class:`NestedRecipe`.

    It is for :func:`nestq.quantize_`. ``torchao.quantization.quantize_`` takes it too, and then
    only :func:`nestq.save` can save the model, not ``model.save_pretrained``.
    """
    return NestedRecipe(**options)


def w8a8(**options: Any) -> W8A8Recipe:
    """The plain W8A8 reference. Options: see :class:`W8A8Recipe`."""
    return W8A8Recipe(**options)


def check_kv(value: object) -> None:
    """Refuse what names no KV policy."""
    if not isinstance(value, str):
        raise ValueError(f"kv must be the name of a KV policy, got {value!r}")
    try:
        KVPolicy.parse(value)
    except ValueError as error:
        raise ValueError(f"kv: {error}") from error


def check_damping(value: object) -> None:
    """Refuse what is no fraction above 0, by name."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 < value <= 1):  # type: ignore[operator]
        raise ValueError(f"damping must be above 0 and at most 1, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse what is none of some values, by name."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Refuse what is neither True nor False, by name."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {value!r}")
