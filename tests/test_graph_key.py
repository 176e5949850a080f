"""A captured round is replayed only where the model is what it was when it was captured."""

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import nested_model, run
from torch import nn
from transformers import PreTrainedModel

from nestq.speculative.graph_key import model_key, settings_key


def fresh() -> Any:
    return copy.deepcopy(nested_model())


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def another_weight(model: Any) -> None:
    model.lm_head.weight = parameter(model.lm_head.weight.clone())


def a_weight_of_another_layer(model: Any) -> None:
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    first.weight = second.weight


def a_weight_read_as_another_dtype(model: Any) -> None:
    norm = model.model.norm
    norm.weight = parameter(norm.weight.data.view(torch.int32))


def another_form_of_a_plane(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.base = weight.base.as_strided(weight.base.shape, weight.base.stride()[::-1])


def another_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


def a_tensor_that_is_no_buffer(model: Any) -> None:
    model.model.rotary_emb.long_inv_freq = torch.ones(3)


def a_number(model: Any) -> None:
    model.model.norm.variance_epsilon *= 2


def a_number_of_another_type(model: Any) -> None:
    model.model.layers[0].self_attn.is_causal = 1


def a_number_in_a_list(model: Any) -> None:
    model.model.factors[1][0] = 3.0


def a_value_of_the_config(model: Any) -> None:
    model.config.rms_norm_eps *= 2


def a_value_inside_the_config(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] *= 2


def another_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def another_class(model: Any) -> None:
    part = model.model.layers[0].mlp
    part.__class__ = type("Other", (type(part),), {})


def another_function(model: Any) -> None:
    part = model.model.layers[0].mlp
    part.forward = types.MethodType(lambda self, x: x, part)


def a_hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def a_hook_before(model: Any) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda *_: None)


def another_module(model: Any) -> None:
    model.model.layers[1].adapter = nn.Identity()


def modules_in_another_order(model: Any) -> None:
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList(layers[::-1])


def a_compiled_call(model: Any) -> None:
    model.compile()


CHANGES: list[Callable[[Any], None]] = [
    another_weight,
    a_weight_of_another_layer,
    a_weight_read_as_another_dtype,
    another_form_of_a_plane,
    another_buffer,
    a_tensor_that_is_no_buffer,
    a_number,
    a_number_of_another_type,
    a_number_in_a_list,
    a_value_of_the_config,
    a_value_inside_the_config,
    another_activation,
    another_class,
    another_function,
    a_hook,
    a_hook_before,
    another_module,
    modules_in_another_order,
    a_compiled_call,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_key(change: Callable[[Any], None]) -> None:
    model = fresh()
    model.model.factors = [1.0, [float("nan")]]
    before = model_key(model)
    assert model_key(model) == before
    change(model)
    assert model_key(model) != before


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_calls_do_not_change_the_key(family: str) -> None:
    model = copy.deepcopy(nested_model(family))
    tokens = small_models.tokens(model, 1, 9)
    run(model, tokens, 2)
    before = model_key(model)
    for options in ({"gamma": 2}, {"gamma": "auto"}, {"gamma": 0, "do_sample": True}):
        run(model, tokens, **options)
        assert model_key(model) == before


def test_numbers_that_change_in_place_are_read_anew() -> None:
    model = fresh()
    before = model_key(model)
    with torch.no_grad():
        model.lm_head.weight.scale.mul_(2)
        model.model.norm.weight.zero_()
    assert model_key(model) == before


def test_a_removed_hook_and_another_one_are_told_apart() -> None:
    model: PreTrainedModel = fresh()
    keys = []
    for _ in range(3):
        handle = model.register_forward_hook(lambda *_: None)
        keys.append(model_key(model))
        handle.remove()
    assert len({str(key) for key in keys}) == 3


def test_a_function_in_place_of_one_that_is_gone() -> None:
    model = fresh()

    def forward() -> Any:
        return lambda x: x

    keys = []
    for _ in range(4):  # a new object may have the number of the one before
        model.model.norm.forward = forward()
        keys.append(model_key(model))
        del model.model.norm.forward
        gc.collect()
    assert all(one != other for i, one in enumerate(keys) for other in keys[:i])


def test_a_key_does_not_keep_the_model() -> None:
    model = fresh()
    model.model.owner = [model.model.norm]
    model.model.norm.forward = types.MethodType(lambda self, x: x, model.model.norm)
    key = model_key(model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None
    assert hash(key) == hash(key)


def test_settings() -> None:
    before = settings_key()
    torch.set_autocast_enabled("cuda", True)
    try:
        assert settings_key() != before
    finally:
        torch.set_autocast_enabled("cuda", False)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if precision != "high" else "medium")
        assert settings_key() != before
    finally:
        torch.set_float32_matmul_precision(precision)
    assert settings_key() == before
