"""What a nestq checkpoint holds on disk, checked from the headers of its files and its scales.

A checkpoint is a Hugging Face folder: ``config.json`` with a ``quantization_config`` and
safetensors files. Each quantized weight ``W[N, K]`` of a module is two or three plain tensors:

===========================  ==============  ===================================================
``<module>.weight.base``        U8 [N, Kp/2]   4-bit codes of the base plane, two a byte
``<module>.weight.scale``       float [N, G]   one scale a row and group
``<module>.weight.refinement``  U8 [N, Kp/2]   of a nested weight: 4-bit codes of the refinement
``<module>.weight.dense``       float [N, K]   of a 4-bit weight whose target is the dense one
===========================  ==============  ===================================================

The last two are what a target adds to the draft, absent where only the base is saved; and a head
has no dense weight of its own where that is the embedding's.
``NestedQuantTensor`` and ``FourBitTensor`` say how codes lie in the bytes. Scales are those that
:func:`nestq.reference.weights.round_scale` gives. Every other tensor is stored as
transformers stores it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from typing import Literal, get_args

from safetensors import SafetensorError, safe_open

from nestq.tensor_checks import check_scale

FORMAT_VERSION = 1
METHOD = "nestq"

Planes = Literal["both", "base"]
TargetPart = Literal["refinement", "dense"]
PARTS = ("base", "scale", *get_args(TargetPart))
_FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class StoredTensor:
    """Header of one tensor: the file that holds it, its safetensors dtype and its shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def check_planes_option(planes: str) -> None:
    """Refuse a value of ``planes`` that names no set of planes."""
    if planes not in get_args(Planes):
        raise ValueError(f"planes must be one of {get_args(Planes)}, got {planes!r}")


def plane_tensors(planes: Planes, target_part: TargetPart | None = "refinement") -> tuple[str, ...]:
    """Names of the tensors that store one quantized weight.

    Args:
        planes: which of them.
        target_part: what the target reads besides the base; None for nothing.
    """
    draft = ("base", "scale")
    if planes == "base" or target_part is None:
        return draft
    return tuple(sorted((*draft, target_part)))


def read_headers(files: Iterable[str | PathLike[str]]) -> dict[str, StoredTensor]:
    """Name, dtype and shape of every tensor in safetensors files; no tensor is read.

    Raises:
        ValueError: a file is cut off or is no safetensors file, or two files hold one tensor.
    """
    headers: dict[str, StoredTensor] = {}
    for path in map(str, files):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in headers:
                        raise ValueError(f"{path}: tensor {name} is in {headers[name].file} too")
                    tensor = file.get_slice(name)
                    headers[name] = StoredTensor(
                        path, tensor.get_dtype(), tuple(tensor.get_shape())
                    )
        except SafetensorError as error:
            raise ValueError(f"{path}: not a complete safetensors file: {error}") from error
    return headers


def check_nested_weights(
    headers: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    group_size: int,
    planes: Planes,
    target_part: TargetPart | None = "refinement",
    tied: str | None = None,
) -> dict[str, int]:
    """Check that every quantized weight is stored completely, and no other one is.

    Args:
        headers: of all files of the checkpoint.
        shapes: logical shape ``(N, K)`` of the weight of each quantized module, by module name.
        group_size: weights that share a scale.
        planes: which planes are to be read.
        target_part: what a target reads besides the base.
        tied: module whose dense weight is the embedding's, which is not stored again.

    Returns:
        Bytes that are read for each quantized weight, by module name.

    Raises:
        ValueError: a tensor is missing, of the wrong dtype or shape, or belongs to no module.
    """
    places = ", ".join(sorted({tensor.file for tensor in headers.values()}))
    sizes = dict.fromkeys(shapes, 0)
    for module, (rows, in_features) in shapes.items():
        groups = -(-in_features // group_size)
        plane, scale = (rows, groups * group_size // 2), (rows, groups)
        part_shapes = {"scale": scale, "dense": (rows, in_features)}
        for part in plane_tensors(planes, None if module == tied else target_part):
            name = f"{module}.weight.{part}"
            if name not in headers:
                raise ValueError(f"{places}: tensor {name} is missing (planes={planes!r})")
            found = headers[name]
            dtypes = list(_FLOAT_BYTES) if part in part_shapes else ["U8"]
            shape = part_shapes.get(part, plane)
            if found.dtype not in dtypes or found.shape != shape:
                raise ValueError(
                    f"{found.file}: tensor {name} must be {' or '.join(dtypes)} of shape {shape} "
                    f"for a weight of {rows} x {in_features} in groups of {group_size}, "
                    f"found {found.dtype} of shape {found.shape}"
                )
            sizes[module] += prod(shape) * _FLOAT_BYTES.get(found.dtype, 1)
    for name, tensor in headers.items():
        module, _, part = name.rpartition(".weight.")
        if part in PARTS and module not in shapes:
            raise ValueError(
                f"{tensor.file}: tensor {name} belongs to no module that quantization_config lists"
            )
    return sizes


def check_scales(headers: Mapping[str, StoredTensor], modules: Iterable[str]) -> None:
    """Read the scales of nested weights, and refuse numbers that no scale can be.

    Args:
        headers: of all files of the checkpoint; every scale is there.
        modules: whose weight is nested.

    Raises:
        ValueError: a scale is negative, infinite, NaN or not exact in fixed point.
    """
    names_of: dict[str, list[str]] = {}
    for name in (f"{module}.weight.scale" for module in modules):
        names_of.setdefault(headers[name].file, []).append(name)
    for path, names in names_of.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                check_scale(f"{path}: tensor {name}", file.get_tensor(name))


def check_dense_weights(
    headers: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    renamed: bool = False,
) -> None:
    """Check the tensors that are not nested: transformers fills in a missing one at random.

    Args:
        headers: of all files of the checkpoint.
        shapes: shape of each tensor that must be stored, by name.
        renamed: transformers has rules by which tensors of this model have other names in files.
            Where names differ, the check is then left to transformers, which knows the rules.

    Raises:
        ValueError: a tensor is missing or of the wrong shape.
    """
    places = ", ".join(sorted({tensor.file for tensor in headers.values()}))
    dense = {name for name in headers if name.rpartition(".weight.")[2] not in PARTS}
    if renamed and not dense <= shapes.keys():
        return
    for name, shape in shapes.items():
        if name not in dense:
            raise ValueError(f"{places}: tensor {name} is missing")
        if headers[name].shape != shape:
            raise ValueError(
                f"{headers[name].file}: tensor {name} must be of shape {shape}, "
                f"found {headers[name].shape}"
            )
