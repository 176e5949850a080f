"""The ``nestq::`` operators: schemas, fakes for torch.compile, and who computes them.

On a GPU the kernels compute; the reference runs there only if it was selected by name, and for
dense linear layers in float32, which have no kernel. On a CPU ``nestq.cpu`` computes what it can,
few tokens at a time, and the reference the rest, or all if it was selected: the bits are the same.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nestq.cpu import attention as cpu_attention
from nestq.cpu import hadamard as cpu_hadamard
from nestq.cpu import kv_append as cpu_kv_append
from nestq.cpu import linear as cpu_linear
from nestq.cpu.library import library
from nestq.reference.attention import nested_attention
from nestq.reference.attention_quantspec import quantspec_attention
from nestq.reference.dense_kv import append_16, attention_16
from nestq.reference.fused_linear import fused_input
from nestq.reference.hadamard import hadamard
from nestq.reference.kv import kv_append
from nestq.reference.linear import base_linear, linear_16, nested_linear
from nestq.reference.quantspec import append_and_attend, quantspec_append
from nestq.reference.rotary import rotate_append
from nestq.tile_layout import canonical_planes

Implementation = Literal["kernels", "reference"]

_library = torch.library.Library("nestq", "DEF")
_selected: Implementation = "kernels"


def select_implementation(name: Implementation) -> None:
    """Choose what computes ``nestq::`` operators: on a CPU, results are the same bit for bit.

    Args:
        name: ``"kernels"`` (the default) or ``"reference"``, eager PyTorch: slow and exact.
    """
    if name not in get_args(Implementation):
        raise ValueError(f"name must be one of {get_args(Implementation)}, got {name!r}")
    global _selected
    _selected = name


def selected_implementation() -> Implementation:
    """What computes ``nestq::`` operators now."""
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


def _cpu_library(tensor: Tensor) -> Any:
    """The C++ that computes on a tensor's device; None where the reference does."""
    return library() if tensor.device.type == "cpu" and _selected == "kernels" else None


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
    """On a CPU, or by the reference: planes in the order of files or, with a unit, in tiles."""
    if unit is not None:
        base, refinement, scale = canonical_planes(base, refinement, scale, unit, group_size)
    arguments = (x, base, refinement, scale, bias, group_size, overlap)
    compiled = _cpu_library(x) if cpu_linear.can_compute(x, group_size) else None
    if compiled is not None:
        return cpu_linear.nested_linear(compiled, *arguments)
    return nested_linear(*arguments)


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


def _base_linear(
    x: Tensor,
    base: Tensor,
    scale: Tensor,
    unit: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    activation_bits: int,
) -> Tensor:
    """On a CPU, or by the reference: a plane in the order of files or, with a unit, in tiles."""
    if unit is not None:
        base, _, scale = canonical_planes(base, None, scale, unit, group_size)
    arguments = (x, base, scale, bias, group_size, activation_bits)
    compiled = _cpu_library(x) if group_size in cpu_linear.GROUP_SIZES else None
    if compiled is None:
        return base_linear(*arguments)
    if activation_bits == 4 and cpu_linear.can_compute(x, group_size):
        planes = (base, None, scale)
        return cpu_linear.nested_linear(compiled, x, *planes, bias, group_size, 1, activation_bits)
    return base_linear(*arguments, partial(cpu_linear.dequantize_base, compiled))


def _base_linear_fake(
    x: Tensor, base: Tensor, scale: Tensor, unit: Tensor | None, *_: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], (base if unit is None else unit).shape[0])


_define(
    "base_linear(Tensor x, Tensor base, Tensor scale, Tensor? unit, Tensor? bias, int group_size, "
    "int activation_bits) -> Tensor",
    _base_linear,
    _base_linear_fake,
    _kernels("linear", "base_linear"),
)

_define(
    "linear_16(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    linear_16,
    lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
    _kernels("linear", "dense_linear"),
)


def _kv_append(
    states: Tensor, positions: Tensor, base: Tensor, refinement: Tensor, scale: Tensor
) -> None:
    planes = (base, refinement, scale)
    compiled = _cpu_library(states) if cpu_kv_append.can_append(*planes) else None
    if compiled is not None:
        cpu_kv_append.kv_append(compiled, states, positions, *planes)
    else:
        kv_append(states, positions, *planes)


_define(
    "kv_append(Tensor states, Tensor positions, Tensor(a!) base, Tensor(b!) refinement, "
    "Tensor(c!) scale) -> ()",
    _kv_append,
    lambda *_: None,
    _kernels("kv_append", "kv_append"),
)


def _hadamard(x: Tensor) -> Tensor:
    compiled = _cpu_library(x) if cpu_hadamard.can_compute(x) else None
    return hadamard(x) if compiled is None else cpu_hadamard.hadamard(compiled, x)


_define(
    "hadamard(Tensor x) -> Tensor",
    _hadamard,
    lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    _kernels("hadamard", "hadamard"),
)

_define(
    "rotate_append(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, "
    "Tensor positions, "
    "Tensor(a!) key_base, Tensor(b!) key_refinement, Tensor(c!) key_scale, "
    "Tensor(d!) value_base, Tensor(e!) value_refinement, Tensor(f!) value_scale, "
    "bool transform=False) -> Tensor",
    partial(rotate_append, append=_kv_append, hadamard=_hadamard),
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
    _kernels("rotate_append", "rotate_append"),
)


def _nested_attention(query: Tensor, positions: Tensor, *arguments: Any) -> Tensor:
    compiled = _cpu_library(query) if cpu_attention.can_compute(query, *arguments[:6]) else None
    if compiled is not None:
        return cpu_attention.nested_attention(compiled, query, positions, *arguments)
    return nested_attention(query, positions, *arguments)


_define(
    "nested_attention(Tensor query, Tensor positions, "
    "Tensor key_base, Tensor? key_refinement, Tensor key_scale, "
    "Tensor value_base, Tensor? value_refinement, Tensor value_scale, "
    "float scaling, int sliding_window, int recent, int sink=0, int local=0) -> Tensor",
    _nested_attention,
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
    "int sliding_window, int sink=0, int local=0) -> Tensor",
    attention_16,
    lambda query, *_: query.new_empty(query.transpose(1, 2).shape).transpose(1, 2),
    _kernels("nested_attention", "attention_16"),
)

_define(
    "quantspec_attention(Tensor query, Tensor keys, Tensor values, Tensor positions, "
    "Tensor(a!) recent_keys, "
    "Tensor(b!) key_base, Tensor(c!) key_refinement, Tensor(d!) key_scale, Tensor(e!) key_zero, "
    "Tensor(f!) recent_values, Tensor(g!) value_base, Tensor(h!) value_refinement, "
    "Tensor(i!) value_scale, Tensor(j!) value_zero, "
    "bool refinement, float scaling, int sliding_window) -> Tensor",
    partial(append_and_attend, quantspec_append, quantspec_attention),
    lambda query, *_: query.new_empty(query.transpose(1, 2).shape).transpose(1, 2),
    partial(
        append_and_attend,
        _kernels("quantspec_append", "quantspec_append"),
        _kernels("attention_quantspec", "quantspec_attention"),
    ),
)
