"""Recipes of one 4-bit weight: what each system is, and options that cannot be."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from nestq import FourBitRecipe, bitnest_w4w8, qspec_w4, quantspec_w4w16, w4a8, w4a16


@pytest.mark.parametrize(
    ("recipe", "draft_bits", "target_bits", "kv", "rotation"),
    [
        (quantspec_w4w16, 16, None, "quantspec", "none"),
        (qspec_w4, 4, 16, "16/16", "orthogonal"),
        (w4a8, 8, 8, "kv8/kv8", "orthogonal"),
        (w4a16, 16, 16, "16/16", "orthogonal"),
    ],
)
def test_what_views_read(
    recipe: Callable[..., FourBitRecipe],
    draft_bits: int,
    target_bits: int | None,
    kv: str,
    rotation: str,
) -> None:
    made = recipe()
    assert (made.draft_bits, made.target_bits) == (draft_bits, target_bits)
    assert (made.name, made.kv, made.rotation) == (recipe.__name__, kv, rotation)
    assert made.calibration_bits == (target_bits or 16)
    assert made.rotate_down == (recipe is qspec_w4)
    assert made.quantize_head == (recipe is not qspec_w4)
    assert FourBitRecipe(**json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    ("options", "weights", "kv"),
    [
        ({}, True, "quantspec"),
        ({"kv": False}, True, "16/16"),
        ({"weights": False}, False, "quantspec"),
    ],
)
def test_the_ablation_of_quantspec(options: dict[str, bool], weights: bool, kv: str) -> None:
    recipe = quantspec_w4w16(**options)
    assert (recipe.weights, recipe.kv) == (weights, kv)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": False, "kv": False}, "weights and kv must not both be False"),
        ({"weights": False, "group_size": 32}, "group_size must be left out with weights=False"),
        ({"weights": 1}, "weights must be a bool, got 1"),
        ({"kv": "kv8/kv8"}, "kv must be a bool, got 'kv8/kv8'"),
        ({"rotation": "orthogonal"}, "rotation must be 'none' for quantspec_w4w16"),
    ],
)
def test_options_of_quantspec_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantspec_w4w16(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_size", 48),
        ("rotation", "random"),
        ("rotate_down", 1),
        ("quantize_head", None),
        ("weights", False),
        ("damping", 0),
        ("scale_dtype", "int8"),
        ("seed", -1),
        ("kv", None),
        ("kv", "kv2/kv8"),
    ],
)
@pytest.mark.parametrize("recipe", [qspec_w4, w4a8, w4a16])
def test_bad_option_is_named(recipe: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        recipe(**{name: value})


@pytest.mark.parametrize("name", ["draft_bits", "target_bits"])
def test_bits_are_those_that_tensors_can_have(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be one of"):
        FourBitRecipe(**{**w4a8().to_dict(), name: 5})


def test_nested_recipes_have_a_policy_too() -> None:
    assert bitnest_w4w8().kv == "kv8/kv8"
    assert bitnest_w4w8(kv="quantspec").to_dict()["kv"] == "quantspec"
    with pytest.raises(ValueError, match=r"^kv: the KV policy must be"):
        bitnest_w4w8(kv="kv3")
