"""``FourBitTensor``: a 4-bit weight that draft and target read with activations of other bits."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.reference import weights as reference
from nestq.reference.hadamard import hadamard
from nestq.tensor import (
    UNDIVIDED,
    divide_to,
    refuse_gradient,
    refuse_storage,
    row_view,
    slice_arguments,
    stable_hash,
)
from nestq.tensor_checks import (
    check_canonical_planes,
    check_codes,
    check_float_dtype,
    check_four_bit_options,
    check_one_device,
    check_scale,
    check_weight,
)
from nestq.tile_layout import canonical_planes, tile_plane, tile_scale
from nestq.tiled_tensor import check_tiles, cut_at_tiles


class FourBitTensor(TorchAOBaseTensor):
    """A weight ``W[N, K]`` as a 4-bit base plane and, where the target reads it, a dense weight.

    With q the codes of the base and s the scale of their row and group, a view multiplies its
    activations x by this:

    ======  ==========================================================================
    draft   ``q * s``, activations of ``draft_bits``
    target  ``q * s``, activations of ``target_bits``; or the dense weight, x as it is
    ======  ==========================================================================

    With an ``input_rotation`` n the base was made of ``W R``, where R is block diagonal, each block
    a Hadamard matrix of size n times ``n ** -0.5``. Views that read the base multiply by R too
    before they round activations: ``(x R) (W R)^T = x W^T``.

    Activations of 4 and 8 bits are codes of :func:`nestq.reference.linear.quantize_activation`,
    with exact sums; of 16 bits, they stay as they are. Outside of views this is the target, and
    a dense target then is PyTorch's own linear layer, as of any dense weight.

    Tensor data, in the order of files or, on a GPU, in tiles, as ``NestedQuantTensor`` and
    ``TiledQuantTensor`` have them:
        base: packed codes, uint8 ``[N, Kp / 2]``; in tiles ``[ceil(N / 16), blocks, 512]``.
        scale: floating point ``[N, G]``; in tiles int16 ``[ceil(N / 16), G, 16]``.
        unit: float32 ``[N]`` in tiles, None in the order of files.
        dense: ``[N, K]`` in ``hp_dtype``, for a target that reads it; None if only the draft is
            loaded.

    Attributes:
        group_size: weights that share a scale: 32, 64 or 128.
        in_features: K.
        hp_dtype: floating-point dtype that the tensor stands for.
        scale_dtype: of the scales in files.
        draft_bits: of the draft's activations: 4, 8 or 16.
        target_bits: of the target's; None where it reads the dense weight.
        input_rotation: size n of the blocks, a power of two that divides K; 0 for none.
    """

    tensor_data_names = ["base", "scale"]
    tensor_attribute_names = [
        "group_size",
        "in_features",
        "hp_dtype",
        "scale_dtype",
        "draft_bits",
        "target_bits",
        "input_rotation",
    ]
    optional_tensor_data_names = ["unit", "dense"]

    base: Tensor
    scale: Tensor
    unit: Tensor | None
    dense: Tensor | None
    group_size: int
    in_features: int
    hp_dtype: torch.dtype
    scale_dtype: torch.dtype
    draft_bits: int
    target_bits: int | None
    input_rotation: int

    @staticmethod
    def __new__(
        cls: type[Self],
        base: Tensor,
        scale: Tensor,
        group_size: int,
        in_features: int,
        hp_dtype: torch.dtype,
        scale_dtype: torch.dtype,
        draft_bits: int,
        target_bits: int | None,
        input_rotation: int = 0,
        unit: Tensor | None = None,
        dense: Tensor | None = None,
    ) -> Self:
        check_four_bit_options(group_size, in_features, draft_bits, target_bits, input_rotation)
        check_float_dtype("hp_dtype", hp_dtype)
        check_float_dtype("scale_dtype", scale_dtype)
        if unit is None:
            check_canonical_planes(base, scale, group_size, 1, in_features, hp_dtype, None)
        else:
            check_tiles(base, scale, unit, group_size, 1, in_features, None)
        rows = (base if unit is None else unit).shape[0]
        _check_dense(dense, (rows, in_features), hp_dtype, target_bits)
        check_one_device({"base": base, "dense": dense})
        self = torch.Tensor._make_wrapper_subclass(
            cls, (rows, in_features), dtype=hp_dtype, device=base.device
        )
        self.base = base
        self.scale = scale
        self.unit = unit
        self.dense = dense
        self.group_size = group_size
        self.in_features = in_features
        self.hp_dtype = hp_dtype
        self.scale_dtype = scale_dtype
        self.draft_bits = draft_bits
        self.target_bits = target_bits
        self.input_rotation = input_rotation
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scale: Tensor,
        dense: Tensor | None = None,
        *,
        group_size: int,
        in_features: int,
        hp_dtype: torch.dtype,
        draft_bits: int,
        target_bits: int | None,
        input_rotation: int = 0,
    ) -> "FourBitTensor":
        """Pack int8 codes ``[N, Kp]`` and a scale ``[N, G]``, in the order of their device.

        Raises:
            ValueError: a code leaves its 4 bits; a scale is negative, not finite, or not exact in
                fixed point, as ``nestq.reference.weights.round_scale`` makes it; or an option is
                off.
        """
        check_codes("codes", codes)
        weight = cls(
            reference.pack_base(codes, group_size),
            scale,
            group_size,
            in_features,
            hp_dtype,
            scale.dtype,
            draft_bits,
            target_bits,
            input_rotation,
            dense=dense,
        )
        check_scale("scale", scale)
        return weight.in_order_of_device()

    @classmethod
    def from_hp(
        cls,
        weight: Tensor,
        group_size: int = 64,
        draft_bits: int = 16,
        target_bits: int | None = None,
        input_rotation: int = 0,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> "FourBitTensor":
        """Round a dense weight ``[N, K]`` to nearest (no calibration).

        The result lies on the weight's device, in the order of that device. A dense target keeps
        the weight itself, not a copy of it.

        Raises:
            ValueError: the weight is not a 2-D floating-point tensor, is NaN, infinite or above
                2^120 in magnitude, its scale overflows ``scale_dtype``, or an option is off.
        """
        check_weight(weight)
        columns = weight.shape[1]
        check_four_bit_options(group_size, columns, draft_bits, target_bits, input_rotation)
        rotated = rotate_input(weight.detach().float(), input_rotation)
        padded = reference.pad_to_groups(rotated, group_size)
        largest = reference.absmax_scale(padded, group_size, 4, torch.float32)
        scale = reference.round_scale(largest, scale_dtype)
        if not torch.isfinite(scale).all():
            raise ValueError(f"scale_dtype {scale_dtype} cannot hold the scale of this weight")
        return cls.from_codes(
            reference.round_to_base(padded, scale, group_size),
            scale,
            weight.detach() if target_bits is None else None,
            group_size=group_size,
            in_features=columns,
            hp_dtype=weight.dtype,
            draft_bits=draft_bits,
            target_bits=target_bits,
            input_rotation=input_rotation,
        )

    def dequantize(self, view: str = "target", dtype: torch.dtype | None = None) -> Tensor:
        """Dense weight ``[N, K]`` of a view, in ``dtype`` (default: the tensor's own).

        It is what multiplies the layer's input: the rotation is undone.
        """
        dtype = dtype or self.hp_dtype
        if activation_bits(self, view) is None:
            assert self.dense is not None
            return self.dense.to(dtype)
        stored = self.canonical()
        compute = torch.promote_types(dtype, torch.float32)
        size, columns = self.group_size, self.in_features
        weight = reference.dequantize(stored.base, None, stored.scale, size, 1, columns, compute)
        return rotate_input(weight, self.input_rotation).to(dtype)

    def linear(self, x: Tensor, bias: Tensor | None, view: str) -> Tensor:
        """``x @ W.T + bias`` with W of a view."""
        return four_bit_linear(x, self, bias, view)

    def canonical(self) -> "FourBitTensor":
        """The weight in the order of files, on the same device."""
        if self.unit is None:
            return self
        base, _, scale = canonical_planes(self.base, None, self.scale, self.unit, self.group_size)
        return self._with_planes(base, scale.to(self.scale_dtype), None)

    def tiled(self) -> "FourBitTensor":
        """The weight in tiles, on the same device.

        Raises:
            ValueError: tiles would change a scale (:func:`nestq.tensor_checks.check_scale`).
        """
        if self.unit is not None:
            return self
        check_scale("scale", self.scale)
        codes, unit = reference.fixed_point_scale(self.scale)
        return self._with_planes(tile_plane(self.base, self.group_size), tile_scale(codes), unit)

    def in_order_of_device(self) -> "FourBitTensor":
        """The weight in the order that its device reads: tiles on a GPU, that of files elsewhere.

        Moving does this by itself. Returns itself if it lies in that order, else a copy.
        """
        return self.tiled() if self.device.type == "cuda" else self.canonical()

    def _with_planes(self, base: Tensor, scale: Tensor, unit: Tensor | None) -> "FourBitTensor":
        _, attributes = self.__tensor_flatten__()
        return FourBitTensor(base, scale, **attributes, unit=unit, dense=self.dense)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph of this tensor depends on; torch keeps such graphs on disk."""
        nestq = torch.ops.nestq
        operators = nestq.base_linear, nestq.dual_plane_linear, nestq.linear_16, nestq.hadamard
        return stable_hash(self, *(operator.default for operator in operators))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        target = "dense" if self.target_bits is None else f"{self.target_bits} bits"
        return (
            f"FourBitTensor(shape={tuple(self.shape)}, draft={self.draft_bits} bits, "
            f"target={target}, group_size={self.group_size}, "
            f"input_rotation={self.input_rotation}, scale={self.scale_dtype}, "
            f"dtype={self.dtype}, device={self.device})"
        )


def _check_dense(
    dense: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, target_bits: int | None
) -> None:
    if dense is None:
        return
    if target_bits is not None:
        raise ValueError(
            f"dense must be None where the target reads the base with {target_bits}-bit activations"
        )
    if tuple(dense.shape) != shape or dense.dtype != dtype:
        raise ValueError(
            f"dense must be {dtype} of shape {shape}, "
            f"got {dense.dtype} of shape {tuple(dense.shape)}"
        )


def rotate_input(x: Tensor, size: int) -> Tensor:
    """``x R`` over the last dimension, R of Hadamard blocks of a size; x itself if that is 0.

    R is its own inverse. For weights: layers call the operator, which has kernels.
    """
    if size == 0:
        return x
    return hadamard(x.unflatten(-1, (-1, size))).flatten(-2)


def activation_bits(weight: FourBitTensor, view: str) -> int | None:
    """Bits of the activations that a view multiplies by the base; None: it reads the dense weight.

    Raises:
        ValueError: the view is unknown.
        RuntimeError: the dense weight is to be read, and is not loaded.
    """
    if view == "draft":
        return weight.draft_bits
    if view != "target":
        raise ValueError(f"view must be 'draft' or 'target', got {view!r}")
    if weight.target_bits is None and weight.dense is None:
        raise RuntimeError(
            "the target view needs the dense weight, and only the base plane is loaded: "
            "use nest_view('draft'), or load with planes='both'"
        )
    return weight.target_bits


def four_bit_linear(x: Tensor, weight: FourBitTensor, bias: Tensor | None, view: str) -> Tensor:
    """``x @ W.T + bias`` with W and the activations of a view.

    A function, as :func:`nestq.tensor.linear_in_view` is, for Dynamo to trace into.

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
    bits = activation_bits(weight, view)
    if bits is None:
        return torch.ops.nestq.linear_16(x, weight.dense, bias)
    if weight.input_rotation:
        blocks = x.unflatten(-1, (-1, weight.input_rotation)).contiguous()
        x = torch.ops.nestq.hadamard(blocks).flatten(-2)
    base, scale, unit, group_size = weight.base, weight.scale, weight.unit, weight.group_size
    if bits == 8:
        return torch.ops.nestq.dual_plane_linear(x, base, None, scale, unit, bias, group_size, 1)
    return torch.ops.nestq.base_linear(x, base, scale, unit, bias, group_size, bits)


implements = FourBitTensor.implements
aten = torch.ops.aten


@FourBitTensor.implements_torch_function(F.linear)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _linear_outside_views(*args, **(kwargs or {}))


@implements(aten.linear.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _linear_outside_views(*args, **(kwargs or {}))


def _linear_outside_views(
    input: Tensor, weight: FourBitTensor, bias: Tensor | None = None
) -> Tensor:
    if activation_bits(weight, "target") is None:
        assert weight.dense is not None
        return F.linear(input, weight.dense, bias)
    return four_bit_linear(input, weight, bias, "target")


@implements(aten.slice.Tensor)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    self, dim, start, end, step = slice_arguments(*args, **kwargs)
    if dim not in (0, -2) or step != 1:
        raise NotImplementedError(
            "FourBitTensor can be sliced along rows (dim 0) with step 1 only, "
            f"got dim {dim}, step {step}"
        )
    if self.unit is not None:
        return row_view(func, args, kwargs, cut_at_tiles(self.shape[0], start, end))
    return row_view(func, args, kwargs, lambda part: aten.slice.Tensor(part, 0, start, end, 1))


@implements(aten._to_copy.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Move to a device, which may read planes in another order.

    A new dtype is that of the dense weight, and what the base stands for: no code changes.
    """
    self = args[0]
    target = self._get_to_kwargs(*args[1:], **kwargs)
    names, attributes = self.__tensor_flatten__()
    attributes["hp_dtype"] = target["dtype"]
    parts = {}
    for name in names:
        part = getattr(self, name)
        dtype = target["dtype"] if name == "dense" else part.dtype
        options = {"non_blocking": target["non_blocking"], "copy": True}
        parts[name] = part.to(target["device"], dtype, **options)
    return FourBitTensor(**parts, **attributes).in_order_of_device()


implements(UNDIVIDED)(divide_to)


@implements(aten.copy_.default)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy planes byte for byte and the dense weight; the destination keeps its dtype."""
    self, source = args[:2]
    if not isinstance(source, FourBitTensor):
        raise ValueError(f"source must be a FourBitTensor, got {type(source).__name__}")
    ours, theirs = _storage_format(self), _storage_format(source)
    if ours != theirs:
        raise ValueError(f"source must be stored as {ours}, got {theirs}")
    source = source.canonical() if self.unit is None else source.tiled()
    for name in self.__tensor_flatten__()[0]:
        getattr(self, name).copy_(getattr(source, name))
    return self


def _storage_format(weight: FourBitTensor) -> dict[str, Any]:
    """Everything that must be equal for contents to be exchanged without changing a code."""
    _, attributes = weight.__tensor_flatten__()
    del attributes["hp_dtype"]
    return attributes | {"shape": tuple(weight.shape), "dense": weight.dense is not None}


FourBitTensor.implements_torch_function(Tensor.requires_grad_)(refuse_gradient)
FourBitTensor.implements_torch_function(Tensor.storage)(refuse_storage)

torch.serialization.add_safe_globals([FourBitTensor])
