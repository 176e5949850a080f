"""Views: which of the nested models a forward pass reads.

A view is a ``TorchFunctionMode``, because Dynamo guards the stack of modes: a compiled model keeps
one graph a view and never runs the other's. A module global that is read while a subclass
dispatches is not guarded.
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from nestq.four_bit_tensor import FourBitTensor, four_bit_linear
from nestq.reference.pointwise import same_bits_anywhere
from nestq.tensor import NestedQuantTensor, linear_in_view

View = Literal["draft", "target"]

# Elementwise functions whose vector and scalar forms differ on a CPU: an element's bits then
# depend on where it lies in memory, so on the number of rows. Those that transformers' activation
# functions (its ACT2FN) are made of; the rest of what they call does not differ.
_POSITION_DEPENDENT = (F.silu, F.gelu, F.softplus, F.mish, torch.sigmoid, Tensor.sigmoid)


class nest_view(TorchFunctionMode):  # noqa: N801 (used like torch.no_grad)
    """Context in which nested weights and caches are read as ``view``.

    Outside of any such context the view is ``"target"``. Contexts nest; the innermost counts.
    Inside one, on a CPU, a row of a linear layer or an activation function has the same bits
    whatever the other rows of the call are. That covers ``F.linear``, and every activation that
    transformers has a name for (``hidden_act`` in a config): what they call of PyTorch does not
    depend on other rows by itself, except ``F.silu``, ``F.gelu`` in both forms, ``F.softplus``,
    ``F.mish``, ``torch.sigmoid`` and ``Tensor.sigmoid``, which are made to. It does not cover other
    functions, or these with ``out=``.

    Args:
        view: ``"draft"`` reads base planes only, ``"target"`` reads base and refinement.
    """

    def __init__(self, view: View) -> None:
        if view not in get_args(View):
            raise ValueError(f"view must be one of {get_args(View)}, got {view!r}")
        super().__init__()
        self.view = view
        if not torch.compiler.is_compiling():
            _install_passes()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(self.view, *args, **kwargs)
        covered = not torch.compiler.is_compiling() and "out" not in kwargs
        if covered and func in _POSITION_DEPENDENT:
            return same_bits_anywhere(func, *args, **kwargs)
        return func(*args, **kwargs)


def _install_passes() -> None:
    """Let ``torch.compile`` run nestq's passes: graphs have their operators inside views only.

    Here and not once for all, because settings of Inductor belong to a thread, and the user's own
    pass may take the place.
    """
    # Most processes never compile.
    from nestq.passes.manager import install

    install()


def current_view() -> View:
    """The view of the innermost :class:`nest_view`, or ``"target"``."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, nest_view):
            return mode.view
    return "target"


def _linear(view: View, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Arguments have the names that ``F.linear`` gives them: callers may use them."""
    if isinstance(weight, NestedQuantTensor):
        return linear_in_view(input, weight, bias, view)
    if isinstance(weight, FourBitTensor):
        return four_bit_linear(input, weight, bias, view)
    return torch.ops.nestq.linear_16(input, weight, bias)
