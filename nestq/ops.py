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
from nestq.reference.kv import kv_append
from nestq.reference.linear import linear_16, nested_linear
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
    "nested_attention(Tensor query, Tensor positions, "
    "Tensor key_base, Tensor? key_refinement, Tensor key_scale, "
    "Tensor value_base, Tensor? value_refinement, Tensor value_scale, "
    "float scaling, int sliding_window, int recent) -> Tensor",
    nested_attention,
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
    _kernels("nested_attention", "nested_attention"),
)
