"""Drafts that skip sublayers, as in Draft & Verify (Zhang et al., ACL 2024, section 3.2).

A decoder layer adds to the residual stream what attention computes, then what the MLP computes. In
the view ``"draft"`` a skipped sublayer adds zeros: neither it nor its norms compute anything, and a
skipped attention writes no keys and values. Verification writes those of every position.

A skipped module gets a class that is derived from its own. So the model keeps its names, its state
dict and its modules, a copy skips what the original skips, and Dynamo guards the choice as it
guards the classes of all modules.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from nestq.architectures import Architecture, SublayerKind, describe, unwrap
from nestq.argument_checks import check_int, check_type
from nestq.view import current_view


def skip_in_draft_(model: nn.Module, attention: Sequence[int], mlp: Sequence[int]) -> None:
    """Let the draft skip sublayers, in place, and no others than these.

    What captured CUDA graphs and compiled graphs compute follows.

    Args:
        model: a causal language model of a known architecture, or what ``torch.compile`` made of
            one. With nothing to skip, any model.
        attention: indices of the decoder layers whose attention is skipped.
        mlp: indices of the decoder layers whose MLP is skipped.

    Raises:
        TypeError, ValueError: an argument is off, or no sublayer is left; nothing is changed.
        UnsupportedArchitectureError: the model's structure is unknown.
    """
    skipped = check_skipped(model, attention, mlp)
    modules = list(_modules(describe(model), skipped)) if any(skipped.values()) else []
    for module in model.modules():
        if isinstance(module, _Skipped):
            object.__setattr__(module, "__class__", module.unskipped)
    for module, mixin in modules:
        object.__setattr__(module, "__class__", _skipped_class(type(module), mixin))


def skipped_in_draft(model: nn.Module) -> dict[str, list[int]]:
    """Indices of the decoder layers whose sublayers the draft skips.

    Args:
        model: any module.

    Returns:
        ``{"attention": [...], "mlp": [...]}``, sorted; two empty lists if it skips nothing.
    """
    if not any(isinstance(module, _Skipped) for module in unwrap(model).modules()):
        return {kind: [] for kind in get_args(SublayerKind)}
    architecture = describe(model)
    return {
        kind: [
            index
            for index in range(len(architecture.layers))
            if isinstance(architecture.sublayer(index, kind), _Skipped)
        ]
        for kind in get_args(SublayerKind)
    }


def check_skipped(
    model: nn.Module, attention: Sequence[int], mlp: Sequence[int]
) -> dict[SublayerKind, tuple[int, ...]]:
    """What :func:`skip_in_draft_` is to skip, in order; refused for the reasons given there."""
    check_type("model", model, nn.Module, "a torch.nn.Module")
    skipped: dict[SublayerKind, tuple[int, ...]] = {
        "attention": check_indices("attention", attention),
        "mlp": check_indices("mlp", mlp),
    }
    if not any(skipped.values()):
        return skipped
    layers = len(describe(model).layers)
    for kind, indices in skipped.items():
        if indices and indices[-1] >= layers:
            raise ValueError(
                f"{kind} must be layer indices from 0 to {layers - 1}, got {indices[-1]}"
            )
    if all(len(indices) == layers for indices in skipped.values()):
        raise ValueError(
            f"attention and mlp must leave a sublayer for the draft, got all {layers} layers in "
            "both"
        )
    return skipped


def check_indices(name: str, indices: object) -> tuple[int, ...]:
    """The indices in order; refused if they are no sequence of different ints from 0."""
    if not isinstance(indices, Sequence) or isinstance(indices, str):
        raise TypeError(
            f"{name} must be a list of layer indices, got {type(indices).__name__} {indices!r}"
        )
    for index in indices:
        check_int(f"{name}: a layer index", index, 0)
    ordered = sorted(indices)
    for one, other in pairwise(ordered):
        if one == other:
            raise ValueError(f"{name} must name each layer once, got {one} twice")
    return tuple(ordered)


class _Skipped(nn.Module):
    """Mixed into the class of a module that a draft skips."""

    unskipped: ClassVar[type[nn.Module]]
    """The class that the module had."""

    # Not `forward`, which libraries that place weights replace in single modules.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_view() == "draft":
            return self.skip(args[0] if args else kwargs["hidden_states"])
        return super().__call__(*args, **kwargs)

    def skip(self, hidden_states: Tensor) -> Any:
        """What the module returns where it is skipped."""
        raise NotImplementedError

    # A class that is made here cannot be found by its name.
    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin = next(base for base in type(self).__bases__ if issubclass(base, _Skipped))
        return _new, (self.unskipped, mixin), self.__dict__


class _SkippedAttention(_Skipped):
    def skip(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """No output and no attention weights."""
        return torch.zeros_like(hidden_states), None


class _SkippedMLP(_Skipped):
    def skip(self, hidden_states: Tensor) -> Tensor:
        """No output."""
        return torch.zeros_like(hidden_states)


class _SkippedNorm(_Skipped):
    def skip(self, hidden_states: Tensor) -> Tensor:
        """The input: in front of a sublayer nothing reads it, after one it is zeros."""
        return hidden_states


_CLASSES: dict[SublayerKind, type[_Skipped]] = {"attention": _SkippedAttention, "mlp": _SkippedMLP}


# One for each class, so that copies have the same.
_made: dict[tuple[type[nn.Module], type[_Skipped]], type[nn.Module]] = {}


def _skipped_class(unskipped: type[nn.Module], mixin: type[_Skipped]) -> type[nn.Module]:
    """The class of a module of some class that a draft skips."""
    name = f"Skipped{unskipped.__name__}"
    made = type(name, (mixin, unskipped), {"unskipped": unskipped})
    return _made.setdefault((unskipped, mixin), made)


def _new(unskipped: type[nn.Module], mixin: type[_Skipped]) -> nn.Module:
    """A skipped module without a state: what pickle and ``copy.deepcopy`` fill."""
    made = _skipped_class(unskipped, mixin)
    return made.__new__(made)


def _modules(
    architecture: Architecture, skipped: dict[SublayerKind, tuple[int, ...]]
) -> Iterator[tuple[nn.Module, type[_Skipped]]]:
    """Modules to skip, and how."""
    for kind, indices in skipped.items():
        for index in indices:
            yield architecture.sublayer(index, kind), _CLASSES[kind]
            for norm in architecture.sublayer_norms(index, kind):
                yield norm, _SkippedNorm
