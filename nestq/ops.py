"""The ``nestq::`` operators: schemas, fakes for torch.compile, and who computes them.

On a CPU the reference computes. On a GPU the kernels do; the reference runs there only if it was
selected by name, and for dense linear layers in float32, which have no kernel.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nestq.reference.attention import nested_attention
from nestq.reference.dense_kv import append_16, attention_16
from nestq.reference.fused_linear import fused_input
from nestq.reference.kv import kv_append
from nestq.reference.linear import linear_16, nested_linear
from nestq.reference.rotary import rotate_append
from nestq.tile_layout import canonical_planes

Implementation = Literal["kernels", "reference"]

_library = torch.library.Library("nestq", "DEF")
_selected: Implementation = "kernels"


def select_implementation(name: Implementation) -> None:
    """Choose what computes ``nestq::`` operators on a GPU; a CPU always runs the reference.

    Args:
        name: ``"kernels"`` (the default) or ``"reference"``, eager PyTorch: slow and exact.
    """
    if name not in get_args(Implementation):
        raise ValueError(f"name must be one of {get_args(Implementation)}, got {name!r}")
    global _selected
    _selected = name


def selected_implementation() -> Implementation:
    """What computes ``nestq::`` operators on a GPU now."""
    return _selected


def _define(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    kernels: Callable[..., Any],
) -> None:
    name = schema.split("(")[0]

    def on_gpu(*args: Any) -> Any:
        # Triton launches on the current device, which need not be that of the tensors.
        with torch.cuda.device(args[0].device):
            return (reference if _selected == "reference" else kernels)(*args)

    _library.define(schema)
    _library.impl(name, reference, "CPU")
    _library.impl(name, on_gpu, "CUDA")
    torch.library.register_fake(f"nestq::{name}", fake, lib=_library)


def _kernels(module: str, function: str) -> Callable[..., Any]:
    """A function of ``nestq.kernels``, imported when it is called: Triton comes with CUDA only."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"nestq.kernels.{module}"), function)(*args)

    return call


def _dual_plane_linear(
    x: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    unit: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
) -> Tensor:
    """The reference, for planes in the order of files or, where rows have a unit, in tiles."""
    if unit is not None:
        base, refinement, scale = canonical_planes(base, refinement, scale, unit, group_size)
    return nested_linear(x, base, refinement, scale, bias, group_size, overlap)


def _dual_plane_linear_fake(
    x: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    unit: Tensor | None,
    *_: Any,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], (base if unit is None else unit).shape[0])


_define(
    "dual_plane_linear(Tensor x, Tensor base, Tensor? refinement, Tensor scale, Tensor? unit, "
    "Tensor? bias, int group_size, int overlap) -> Tensor",
    _dual_plane_linear,
    _dual_plane_linear_fake,
    _kernels("linear", "linear"),
)


def _fused_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
    bases: list[Tensor],
    refinements: list[Tensor],
    scales: list[Tensor],
    units: list[Tensor],
    biases: list[Tensor | None],
    group_size: int,
    overlap: int,
) -> tuple[Tensor, Tensor]:
    """The reference: one ``dual_plane_linear`` after the other."""
    value, total = fused_input(x, residual, norm_weight, eps, gate)
    none: list[None] = [None] * len(bases)
    weights = zip(bases, refinements or none, scales, units or none, biases, strict=True)
    parts = [
        _dual_plane_linear(value, base, refinement, scale, unit, bias, group_size, overlap)
        for base, refinement, scale, unit, bias in weights
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), total


def _fused_linear_fake(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
    bases: list[Tensor],
    refinements: list[Tensor],
    scales: list[Tensor],
    units: list[Tensor],
    *_: Any,
) -> tuple[Tensor, Tensor]:
    rows = sum(one.shape[0] for one in units or bases)
    return x.new_empty(*x.shape[:-1], rows), x.new_empty(0 if residual is None else x.shape)


_define(
    "fused_linear(Tensor x, Tensor? residual, Tensor? norm_weight, float eps, Tensor? gate, "
    "Tensor[] bases, Tensor[] refinements, Tensor[] scales, Tensor[] units, Tensor?[] biases, "
    "int group_size, int overlap) -> (Tensor, Tensor)",
    _fused_linear,
    _fused_linear_fake,
    _kernels("fused_linear", "fused_linear"),
)

_define(
    "linear_16(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    linear_16,
    lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
    _kernels("linear", "dense_linear"),
)

_define(
    "kv_append(Tensor states, Tensor positions, Tensor(a!) base, Tensor(b!) refinement, "
    "Tensor(c!) scale) -> ()",
    kv_append,
    lambda *_: None,
    _kernels("kv_append", "kv_append"),
)

_define(
    "rotate_append(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, "
    "Tensor positions, "
    "Tensor(a!) key_base, Tensor(b!) key_refinement, Tensor(c!) key_scale, "
    "Tensor(d!) value_base, Tensor(e!) value_refinement, Tensor(f!) value_scale) -> Tensor",
    rotate_append,
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
    _kernels("rotate_append", "rotate_append"),
)

_define(
    "nested_attention(Tensor query, Tensor positions, "
    "Tensor key_base, Tensor? key_refinement, Tensor key_scale, "
    "Tensor value_base, Tensor? value_refinement, Tensor value_scale, "
    "float scaling, int sliding_window, int recent) -> Tensor",
    nested_attention,
    lambda query, *_: query.new_empty(query.transpose(1, 2).shape).transpose(1, 2),
    _kernels("nested_attention", "nested_attention"),
)

_define(
    "append_16(Tensor keys, Tensor values, Tensor positions, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache) -> ()",
    append_16,
    lambda *_: None,
    _kernels("append_16", "append_16"),
)

_define(
    "attention_16(Tensor query, Tensor positions, Tensor keys, Tensor values, float scaling, "
    "int sliding_window) -> Tensor",
    attention_16,
    lambda query, *_: query.new_empty(query.transpose(1, 2).shape).transpose(1, 2),
    _kernels("nested_attention", "attention_16"),
)
