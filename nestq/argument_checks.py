"""Checks of arguments that several public functions share. Every error names the argument."""

from typing import TypeVar

import torch
from torch import nn

Kind = TypeVar("Kind")


def check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse what is no int within bounds; True and False are none."""
    in_bounds = (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= least
        and (most is None or value <= most)
    )
    if not in_bounds:
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an int {bounds}, got {value!r}")


def check_type(name: str, value: object, kind: type[Kind], expected: str) -> Kind:
    """The value; refused if it is not of a kind, which ``expected`` describes."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")
    return value


def existing_device(device: torch.device | str) -> torch.device:
    """The device, once something has been put there.

    Raises:
        ValueError: nothing can be put there.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        raise ValueError(f"device {device!r} cannot be used: {error}") from error


def usable_device(device: torch.device | str) -> torch.device:
    """The device, if something can be computed there.

    Raises:
        ValueError: it is missing, or the meta device, which holds no numbers.
    """
    usable = existing_device(device)
    if usable.type == "meta":
        raise ValueError(f"device {device!r} cannot be used: it holds no numbers")
    return usable


def first_in_training(model: nn.Module) -> str | None:
    """Name of a module that is in training mode; "model" for the whole, None if there is none."""
    return next((name or "model" for name, part in model.named_modules() if part.training), None)
