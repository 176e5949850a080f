"""The ``nestq::`` operators: schemas, fakes for torch.compile, and who computes them.

On a CPU the reference computes. On a GPU the kernels do; where there is no kernel the operator
says so, and the reference runs there only if it was selected by name.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nestq.reference.attention import nested_attention
from nestq.reference.kv import kv_append
from nestq.reference.linear import linear_16, nested_linear

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
    """What computes ``nestq::`` operators on a GPU."""
    return _selected


def _define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]

    def on_gpu(*args: Any) -> Any:
        if _selected == "reference":
            return reference(*args)
        raise NotImplementedError(
            f"nestq::{name} has no CUDA kernel in this version. Run on the CPU, or choose the "
            "eager reference: nestq.select_implementation('reference')"
        )

    _library.define(schema)
    _library.impl(name, reference, "CPU")
    _library.impl(name, on_gpu, "CUDA")
    torch.library.register_fake(f"nestq::{name}", fake, lib=_library)


def _linear_fake(x: Tensor, base: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], base.shape[0])


_define(
    "dual_plane_linear(Tensor x, Tensor base, Tensor? refinement, Tensor scale, Tensor? bias, "
    "int group_size, int overlap) -> Tensor",
    nested_linear,
    _linear_fake,
)

_define("linear_16(Tensor x, Tensor weight, Tensor? bias) -> Tensor", linear_16, _linear_fake)

_define(
    "kv_append(Tensor states, Tensor positions, Tensor(a!) base, Tensor(b!) refinement, "
    "Tensor(c!) scale) -> ()",
    kv_append,
    lambda *_: None,
)

_define(
    "nested_attention(Tensor query, Tensor positions, "
    "Tensor key_base, Tensor? key_refinement, Tensor key_scale, "
    "Tensor value_base, Tensor? value_refinement, Tensor value_scale, "
    "float scaling, int sliding_window, int recent) -> Tensor",
    nested_attention,
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)
