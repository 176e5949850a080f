"""Shared checks name the argument, what came and what is expected."""

from typing import Any

import pytest
import torch
from torch import nn

from nestq.argument_checks import (
    check_int,
    check_type,
    existing_device,
    first_in_training,
    usable_device,
)


@pytest.mark.parametrize("value", [0, 5, True, 2.0, "3", None])
def test_what_is_no_int_in_bounds(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^steps must be an int from 1 to 4, got {value!r}$"):
        check_int("steps", value, 1, 4)


def test_ints_in_bounds() -> None:
    check_int("steps", 1, 1, 4)
    check_int("steps", 4, 1, 4)
    check_int("steps", 10**30, 1)
    with pytest.raises(ValueError, match=r"^steps must be an int >= 1, got 0$"):
        check_int("steps", 0, 1)


def test_types() -> None:
    check_type("model", nn.Linear(1, 1), nn.Module, "a module")
    with pytest.raises(TypeError, match=r"^model must be a module, got NoneType$"):
        check_type("model", None, nn.Module, "a module")


@pytest.mark.parametrize("device", ["nowhere", 3.5, "cuda:99"])
def test_devices_that_are_not_there(device: Any) -> None:
    for check in (existing_device, usable_device):
        with pytest.raises(ValueError, match=f"^device {device!r} cannot be used: "):
            check(device)


def test_the_meta_device_exists_but_computes_nothing() -> None:
    assert existing_device("meta") == torch.device("meta")
    assert usable_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^device 'meta' cannot be used: it holds no numbers$"):
        usable_device("meta")


def test_the_first_module_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval()
    assert first_in_training(model) is None
    model[1].train()
    assert first_in_training(model) == "1"
    assert first_in_training(model.train()) == "model"
