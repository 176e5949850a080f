"""``NestedQuantTensor``: one weight that is a 4-bit and an 8-bit weight at once."""

import hashlib
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import TorchAOBaseTensor

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.reference import weights as reference
from nestq.tensor_checks import (
    check_canonical_planes,
    check_codes,
    check_composed,
    check_options,
    check_scale,
    check_weight,
)


class NestedQuantTensor(TorchAOBaseTensor):
    """A weight ``W[N, K]`` stored as a 4-bit base plane and a 4-bit refinement plane.

    With q and q_r the codes of base and refinement and s the scale of their row and group::

        draft weight  = q * s
        target weight = (overlap * q + q_r) * s / overlap

    K is padded with zero codes to ``Kp``, a whole number of groups; ``G = Kp / group_size``. In
    each group byte j holds code j in its low and code j + group_size / 2 in its high nibble.

    Tensor data:
        base: uint8 ``[N, Kp / 2]``, two's complement nibbles of q in [-8, 7].
        scale: floating point ``[N, G]``.
        refinement: uint8 ``[N, Kp / 2]``, nibbles of q_r + 8; None if only the draft is loaded.

    Attributes:
        group_size: weights that share a scale: 32, 64 or 128.
        overlap: base steps are divided in this many target steps, 1 to 16. The paper has 16; less
            lets the refinement reach further, ``8 / overlap`` base steps.
        in_features: K.
        hp_dtype: floating-point dtype that the tensor stands for.

    Slices of rows alias the planes of the whole (``test_row_slices_alias``).

    Kernels read planes in tiles, which are a ``TiledQuantTensor``: what this becomes when it is
    moved to a GPU or made there. :meth:`in_order_of_device` is for the rest, such as a file that
    was loaded by ``torch.load(map_location=...)`` to another device than it was saved from.
    """

    tensor_data_names = ["base", "scale"]
    tensor_attribute_names = ["group_size", "overlap", "in_features", "hp_dtype"]
    optional_tensor_data_names = ["refinement"]

    base: Tensor
    scale: Tensor
    refinement: Tensor | None
    unit: Tensor | None = None
    """Set where planes lie in the order of GPU kernels: see ``TiledQuantTensor``."""
    group_size: int
    overlap: int
    in_features: int
    hp_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls: type[Self],
        base: Tensor,
        scale: Tensor,
        group_size: int,
        overlap: int,
        in_features: int,
        hp_dtype: torch.dtype,
        refinement: Tensor | None = None,
    ) -> Self:
        check_canonical_planes(base, scale, group_size, overlap, in_features, hp_dtype, refinement)
        self = torch.Tensor._make_wrapper_subclass(
            cls, (base.shape[0], in_features), dtype=hp_dtype, device=base.device
        )
        self.base = base
        self.scale = scale
        self.refinement = refinement
        self.group_size = group_size
        self.overlap = overlap
        self.in_features = in_features
        self.hp_dtype = hp_dtype
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def from_codes(
        cls,
        base_codes: Tensor,
        refinement_codes: Tensor | None,
        scale: Tensor,
        *,
        group_size: int,
        overlap: int,
        in_features: int,
        hp_dtype: torch.dtype,
    ) -> "NestedQuantTensor":
        """Pack int8 codes ``[N, Kp]`` and a scale ``[N, G]``, in the order of their device.

        Raises:
            ValueError: a code leaves its 4 bits, or a composed code its 8 bits; a scale is
                negative, not finite, or not exact in fixed point, as
                ``nestq.reference.weights.round_scale`` makes it; or an option is off.
        """
        check_options(group_size, overlap)
        check_codes("base_codes", base_codes)
        refinement = None
        if refinement_codes is not None:
            check_codes("refinement_codes", refinement_codes)
            check_composed(base_codes, refinement_codes, overlap)
            refinement = reference.pack_refinement(refinement_codes, group_size)
        base = reference.pack_base(base_codes, group_size)
        weight = NestedQuantTensor(
            base, scale, group_size, overlap, in_features, hp_dtype, refinement
        )
        check_scale("scale", scale)
        # A subclass is an order by itself.
        return weight.in_order_of_device() if cls is NestedQuantTensor else cls.in_own_order(weight)

    @classmethod
    def from_hp(
        cls,
        weight: Tensor,
        group_size: int = 128,
        overlap: int = 8,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> "NestedQuantTensor":
        """Nest a dense weight ``[N, K]`` by rounding to nearest (no calibration).

        The result lies on the weight's device, in the order of that device. A group whose scale
        underflows to zero in ``scale_dtype`` becomes a group of zeros.

        Raises:
            ValueError: the weight is not a 2-D floating-point tensor, is NaN, infinite or above
                2^120 in magnitude, its scale overflows ``scale_dtype``, or an option is off.
        """
        check_weight(weight)
        check_options(group_size, overlap)
        padded = reference.pad_to_groups(weight.detach().float(), group_size)
        largest = reference.absmax_scale(padded, group_size, 4, torch.float32)
        scale = reference.round_scale(largest, scale_dtype)
        if not torch.isfinite(scale).all():
            raise ValueError(f"scale_dtype {scale_dtype} cannot hold the scale of this weight")
        base_codes = reference.round_to_base(padded, scale, group_size)
        refinement_codes, _ = reference.refine(padded, base_codes, scale, group_size, overlap)
        return cls.from_codes(
            base_codes,
            refinement_codes,
            scale,
            group_size=group_size,
            overlap=overlap,
            in_features=weight.shape[1],
            hp_dtype=weight.dtype,
        )

    def dequantize(self, view: str = "target", dtype: torch.dtype | None = None) -> Tensor:
        """Dense weight ``[N, K]`` of a view, in ``dtype`` (default: the tensor's own)."""
        return reference.dequantize(
            self.base,
            refinement_of_view(self, view),
            self.scale,
            self.group_size,
            self.overlap,
            self.in_features,
            dtype or self.hp_dtype,
        )

    def linear(self, x: Tensor, bias: Tensor | None, view: str) -> Tensor:
        """``x @ W.T + bias`` with W of a view; the draft never touches the refinement."""
        return linear_in_view(x, self, bias, view)

    def stored_scale_dtype(self) -> torch.dtype:
        """Dtype of the scales in files."""
        return self.scale.dtype

    def canonical(self) -> "NestedQuantTensor":
        """The weight in the order of files, on the same device."""
        return self

    def in_order_of_device(self) -> "NestedQuantTensor":
        """The weight in the order that its device reads: tiles on a GPU, that of files elsewhere.

        Moving does this by itself. It is for a weight that came to its device otherwise::

            weight = torch.load(file, map_location="cuda").in_order_of_device()

        Returns:
            Itself if it lies in that order, else a copy on the same device.
        """
        # The other order's module builds on this one.
        from nestq.tiled_tensor import TiledQuantTensor

        order = TiledQuantTensor if self.device.type == "cuda" else NestedQuantTensor
        return order.in_own_order(self)

    @classmethod
    def in_own_order(cls, weight: "NestedQuantTensor") -> "NestedQuantTensor":
        """A weight in the order of this class, on the same device."""
        return weight.canonical()

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph of this tensor depends on; torch keeps such graphs on disk.

        The operator's schema is part of it, so that a graph of another version is not taken.
        """
        return stable_hash(self, torch.ops.nestq.dual_plane_linear.default)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        planes = "base" if self.refinement is None else "base + refinement"
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, planes={planes}, "
            f"group_size={self.group_size}, overlap={self.overlap}, "
            f"scale={self.stored_scale_dtype()}, dtype={self.dtype}, device={self.device})"
        )


def linear_in_view(x: Tensor, weight: NestedQuantTensor, bias: Tensor | None, view: str) -> Tensor:
    """``x @ W.T + bias`` with W of a view; the draft never touches the refinement.

    A function, because Dynamo traces into one and leaves a tensor's method call as it is: a
    compiled model's graph then has the operator on plain planes, for passes to match.

    Args:
        x: ``[..., K]`` floating point.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        view: ``"draft"`` or ``"target"``.

    Returns:
        ``[..., N]`` in the dtype of x.
    """
    if x.shape[-1] != weight.in_features:
        raise ValueError(
            f"input must have {weight.in_features} features, got shape {tuple(x.shape)}"
        )
    return torch.ops.nestq.dual_plane_linear(
        x,
        weight.base,
        refinement_of_view(weight, view),
        weight.scale,
        weight.unit,
        bias,
        weight.group_size,
        weight.overlap,
    )


def refinement_of_view(weight: NestedQuantTensor, view: str) -> Tensor | None:
    """The plane that a view adds to the base: none for the draft."""
    if view == "draft":
        return None
    if view != "target":
        raise ValueError(f"view must be 'draft' or 'target', got {view!r}")
    if weight.refinement is None:
        raise RuntimeError(
            "the target view needs the refinement plane, and only the base plane is loaded: "
            "use nest_view('draft'), or load with planes='both'"
        )
    return weight.refinement


implements = NestedQuantTensor.implements
aten = torch.ops.aten


@NestedQuantTensor.implements_torch_function(F.linear)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _linear_outside_views(*args, **(kwargs or {}))


@implements(aten.linear.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _linear_outside_views(*args, **(kwargs or {}))


def _linear_outside_views(
    input: Tensor, weight: NestedQuantTensor, bias: Tensor | None = None
) -> Tensor:
    return linear_in_view(input, weight, bias, "target")


@implements(aten.slice.Tensor)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _, dim, start, end, step = slice_arguments(*args, **kwargs)
    if dim not in (0, -2) or step != 1:
        raise NotImplementedError(
            "NestedQuantTensor can be sliced along rows (dim 0) with step 1 only, "
            f"got dim {dim}, step {step}"
        )
    return row_view(func, args, kwargs, lambda plane: aten.slice.Tensor(plane, 0, start, end, 1))


def row_view(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Callable[[Tensor], Tensor]
) -> Tensor:
    """A view of rows of the first argument: what ``cut`` leaves of its planes."""
    self = args[0]
    # PyTorch counts the writes to a view of a normal tensor, in inference mode too, and cannot
    # count them where the view is an inference tensor.
    with torch.inference_mode(self.is_inference()):
        return return_and_correct_aliasing(func, args, kwargs, self._apply_fn_to_data(cut))


def slice_arguments(
    self: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> tuple[Any, int, int | None, int | None, int]:
    """Arguments of ``aten.slice`` with its defaults."""
    return self, dim, start, end, step


@implements(aten._to_copy.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Move planes to a device, which may read them in another order.

    A new dtype changes what the tensor stands for, never a code.
    """
    self = args[0]
    target = self._get_to_kwargs(*args[1:], **kwargs)

    def move(plane: Tensor) -> Tensor:
        return plane.to(target["device"], non_blocking=target["non_blocking"], copy=True)

    moved = self._apply_fn_to_data(move)
    names, attributes = moved.__tensor_flatten__()
    planes = {name: getattr(moved, name) for name in names}
    attributes["hp_dtype"] = target["dtype"]
    return type(self)(**planes, **attributes).in_order_of_device()


UNDIVIDED = [aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other]


@implements(UNDIVIDED)
def divide_to(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """In inference mode ``to`` arrives undivided: leave it to ``_to_copy`` above."""
    return func.decompose(*args, **kwargs)


@implements(aten.copy_.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy planes byte for byte; as everywhere, the destination keeps its dtype."""
    self, source = args[:2]
    if not isinstance(source, NestedQuantTensor):
        raise ValueError(f"source must be a NestedQuantTensor, got {type(source).__name__}")
    ours, theirs = _storage_format(self), _storage_format(source)
    if ours != theirs:
        raise ValueError(f"source must be stored as {ours}, got {theirs}")
    source = self.in_own_order(source)
    for name in self.__tensor_flatten__()[0]:
        getattr(self, name).copy_(getattr(source, name))
    return self


def stable_hash(weight: TorchAOBaseTensor, *operators: Any) -> str:
    """A hash of the format of a weight's tensors, its attributes and the schemas of operators."""
    names, attributes = weight.__tensor_flatten__()
    planes = [(name, repr(_plane_format(getattr(weight, name)))) for name in names]
    schemas = [operator._schema for operator in operators]
    options = sorted(attributes.items(), key=str)
    described = repr((type(weight).__name__, planes, options, schemas))
    return hashlib.sha256(described.encode()).hexdigest()


def _plane_format(plane: Tensor) -> tuple[Any, ...]:
    return plane.dtype, tuple(plane.shape), plane.stride(), plane.device


def _storage_format(tensor: NestedQuantTensor) -> dict[str, Any]:
    """Everything that must be equal for planes to be exchanged without changing a byte."""
    return {
        "shape": tuple(tensor.shape),
        "group_size": tensor.group_size,
        "overlap": tensor.overlap,
        "scale": tensor.stored_scale_dtype(),
        "refinement": tensor.refinement is not None,
    }


@NestedQuantTensor.implements_torch_function(Tensor.requires_grad_)
def refuse_gradient(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``requires_grad_`` of a weight that cannot have a gradient."""
    return _requires_grad_(*args, **(kwargs or {}))


def _requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
    if requires_grad:
        raise ValueError(
            f"requires_grad must be False: the codes of a {type(self).__name__} are integers and "
            "have no gradient. As a parameter: torch.nn.Parameter(weight, requires_grad=False)"
        )
    return self


@NestedQuantTensor.implements_torch_function(Tensor.storage)
def refuse_storage(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What ``save_pretrained`` asks for where it does not know that a model is nested."""
    raise RuntimeError(
        "a nested weight has no storage of its own, only its planes have. To save a model that "
        "torchao.quantization.quantize_ nested: nestq.save(model, folder)"
    )


torch.serialization.add_safe_globals([NestedQuantTensor])
