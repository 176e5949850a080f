"""Recipes of one 4-bit weight: QuantSpec, QSpec, and the plain W4A8 and W4A16 to compare with."""

from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch

from nestq.argument_checks import check_int
from nestq.recipes import (
    MAX_SEED,
    SCALE_DTYPES,
    RotationChoice,
    check_bool,
    check_choice,
    check_damping,
    check_kv,
)
from nestq.tensor_checks import ACTIVATION_BITS, check_options


@dataclass(frozen=True, kw_only=True)
class FourBitRecipe:
    """One W4 weight a linear, and the activations with which draft and target read it.

    Attributes:
        name: of the system.
        draft_bits: of the draft's activations: 4, 8 or 16.
        target_bits: of the target's; None where it reads the 16-bit weight, which stays beside
            the 4-bit one.
        kv: the model's default KV policy (:meth:`nestq.KVPolicy.parse`).
        weights: whether weights are quantized at all; without, only ``kv`` is stored.
        group_size: weights that share a scale: 32, 64 or 128.
        rotation: kind of R1 and R2 (see ``nestq.rotation``), or ``"none"``, which a target that
            reads the 16-bit weight needs.
        rotate_down: have the MLP's output linear multiply its input by a block-diagonal Hadamard
            matrix: blocks of the largest power of two, up to 512, that divides its features.
        quantize_head: quantize the output head too.
        damping: fraction of the Hessian's mean diagonal that GPTQ adds to it, above 0, at most 1.
        scale_dtype: storage of scales: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        seed: of the rotation, 0 to 2^64 - 1.
    """

    name: str
    draft_bits: int
    target_bits: int | None
    kv: str
    weights: bool = True
    group_size: int = 64
    rotation: RotationChoice = "none"
    rotate_down: bool = False
    quantize_head: bool = True
    damping: float = 0.01
    scale_dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("draft_bits", self.draft_bits, ACTIVATION_BITS)
        check_choice("target_bits", self.target_bits, (*ACTIVATION_BITS, None))
        check_kv(self.kv)
        check_options(self.group_size, 1)
        check_choice("rotation", self.rotation, get_args(RotationChoice))
        if self.target_bits is None and self.rotation != "none":
            raise ValueError(
                f"rotation must be 'none' for {self.name}, got {self.rotation!r}: its target is "
                "the 16-bit model as it is"
            )
        for name in ("weights", "rotate_down", "quantize_head"):
            check_bool(name, getattr(self, name))
        if not self.weights and self.target_bits is not None:
            raise ValueError(f"weights must be True for {self.name}: its target reads them")
        check_damping(self.damping)
        check_choice("scale_dtype", self.scale_dtype, tuple(SCALE_DTYPES))
        check_int("seed", self.seed, 0, MAX_SEED)

    @property
    def torch_scale_dtype(self) -> torch.dtype:
        """``scale_dtype`` as a torch dtype."""
        return SCALE_DTYPES[self.scale_dtype]

    @property
    def calibration_bits(self) -> int:
        """Of the activations with which the base is made: those of the target, or 16."""
        return self.target_bits or 16

    def to_dict(self) -> dict[str, Any]:
        """Options as plain JSON values."""
        return asdict(self)


def quantspec_w4w16(*, weights: bool = True, kv: bool = True, **options: Any) -> FourBitRecipe:
    """QuantSpec: a W4A16 draft beside the 16-bit target, and a hierarchical KV cache.

    The draft's weights are 4-bit codes with a scale a group, made of the 16-bit weights; the target
    is the model as it was, bit for bit. Keys and values are an upper nibble, which the draft reads,
    and a lower one, which the target adds, with full-precision buffers of the newest tokens
    (:class:`nestq.QuantSpecKVCache`). QuantSpec, arXiv 2502.10424, section 4; section 5.3 is the
    ablation that ``weights`` and ``kv`` are for.

    Linears keep both weights: memory is that of 16 bits and 4 bits together.

    Args:
        weights: have the draft read 4-bit weights.
        kv: have the hierarchical cache as the model's default, else one of 16 bits.
        **options: of :class:`FourBitRecipe`, for the weights.

    Raises:
        ValueError: both are False: the draft would be its target; or an option is off.
    """
    check_bool("weights", weights)
    check_bool("kv", kv)
    if not (weights or kv):
        raise ValueError(
            "weights and kv must not both be False in quantspec_w4w16(): the draft would be its "
            "target"
        )
    if options and not weights:
        raise ValueError(
            f"{', '.join(options)} must be left out with weights=False: no weight is quantized"
        )
    policy = "quantspec" if kv else "16/16"
    return FourBitRecipe(
        name="quantspec_w4w16",
        draft_bits=16,
        target_bits=None,
        kv=policy,
        weights=weights,
        **options,
    )


def qspec_w4(**options: Any) -> FourBitRecipe:
    """QSpec: one W4 weight, which the draft reads with 4-bit activations and the target with 16.

    Weights and cache are shared: nothing is stored twice. 4-bit activations need rotations: R1 and
    R2 are folded into weights, and the MLP's output linear, whose input no rotation reaches
    offline, multiplies it by a Hadamard matrix online, as QuaRot does (arXiv 2404.00456). The draft
    rounds a token's activations to codes -7 to 7 of ``0.9 max|x| / 7``. The head stays in 16 bits.
    QSpec, arXiv 2410.11305.

    Args:
        **options: of :class:`FourBitRecipe`.

    Raises:
        ValueError: an option is off.
    """
    defaults = {"rotation": "orthogonal", "rotate_down": True, "quantize_head": False}
    return FourBitRecipe(
        name="qspec_w4", draft_bits=4, target_bits=16, **{"kv": "16/16", **defaults, **options}
    )


def w4a8(**options: Any) -> FourBitRecipe:
    """Plain W4A8 for comparison: what a BitNest draft reads, as a model. Both views are the same.

    Args:
        **options: of :class:`FourBitRecipe`.

    Raises:
        ValueError: an option is off.
    """
    defaults = {"rotation": "orthogonal", "kv": "kv8/kv8"}
    return FourBitRecipe(name="w4a8", draft_bits=8, target_bits=8, **{**defaults, **options})


def w4a16(**options: Any) -> FourBitRecipe:
    """Plain W4A16 for comparison: a QSpec target without its draft. Both views are the same.

    Args:
        **options: of :class:`FourBitRecipe`.

    Raises:
        ValueError: an option is off.
    """
    defaults = {"rotation": "orthogonal", "kv": "16/16"}
    return FourBitRecipe(name="w4a16", draft_bits=16, target_bits=16, **{**defaults, **options})
