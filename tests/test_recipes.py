"""Recipes: defaults, and that every option that cannot be is refused by name."""

import json
from typing import Any

import pytest
import torch

from nestq.recipes import bitnest_w4w8, w8a8


@pytest.mark.parametrize(
    ("options", "overlap"),
    [({}, 8), ({"refinement": "closed_form"}, 16), ({"overlap": 12}, 12)],
)
def test_default_overlap(options: dict[str, Any], overlap: int) -> None:
    recipe = bitnest_w4w8(**options)
    assert recipe.overlap == recipe.target_overlap == overlap


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_scale_dtype(name: str) -> None:
    assert bitnest_w4w8(scale_dtype=name).torch_scale_dtype is getattr(torch, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_size", 48),
        ("group_size", None),
        ("group_size", 64.0),
        ("refinement", "open"),
        ("overlap", 0),
        ("overlap", 17),
        ("overlap", 8.0),
        ("overlap", True),
        ("rotation", "random"),
        ("rotation", None),
        ("quantize_head", "no"),
        ("damping", 0),
        ("damping", 1.5),
        ("damping", True),
        ("damping", float("nan")),
        ("damping", "much"),
        ("tuning_steps", -1),
        ("tuning_steps", 2.5),
        ("tuning_steps", True),
        ("tune_codes", "yes"),
        ("scale_dtype", "float64"),
        ("scale_dtype", torch.float16),
        ("seed", 0.5),
        ("seed", None),
        ("seed", True),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_option_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        bitnest_w4w8(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("rotation", "random"), ("quantize_head", 1), ("seed", "x")]
)
def test_bad_option_of_w8a8_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        w8a8(**{name: value})


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="bits"):
        bitnest_w4w8(bits=4)


def test_tuning_codes_needs_steps() -> None:
    with pytest.raises(ValueError, match=r"tune_codes needs tuning_steps"):
        bitnest_w4w8(tune_codes=True)
    assert bitnest_w4w8(tune_codes=True, tuning_steps=1).tune_codes


def test_as_json() -> None:
    recipe = bitnest_w4w8(group_size=32, seed=3)
    options = json.loads(json.dumps(recipe.to_dict()))
    assert options.pop("name") == "bitnest_w4w8"
    assert bitnest_w4w8(**options) == recipe
