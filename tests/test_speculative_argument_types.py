"""Arguments of other types than expected: right, or one clear error before the model runs."""

from typing import Any

import numpy as np
import pytest
import small_models
import torch
from speculative_runs import nested_model, run
from test_speculative_bad_arguments import runs_forbidden

TOKENS = small_models.tokens(nested_model(), 1, 6)
ODD = [np.int64(2), np.array(2), np.array([2, 3]), torch.tensor(2), True, 2.0, {2}, b"2"]
INTS = ("gamma", "prompt_lookup", "seed", "max_new_tokens")


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("name", INTS)
def test_what_is_no_int_is_refused(name: str, value: Any) -> None:
    options = {"gamma": 2, "do_sample": True, name: value}
    with runs_forbidden(nested_model()), pytest.raises(ValueError, match=f"{name} must be an int"):
        run(nested_model(), TOKENS, **options)


@pytest.mark.parametrize("value", [[True], [1.0], [np.int64(1)], ["1"], [[1]]], ids=repr)
def test_what_is_no_list_of_ints_is_refused(value: Any) -> None:
    with runs_forbidden(nested_model()), pytest.raises(ValueError, match="seed must be an int"):
        run(nested_model(), TOKENS, 2, do_sample=True, seed=value)


@pytest.mark.parametrize(
    "value", [1, 0, 1.0, np.bool_(True), np.array([1, 0]), torch.tensor(True), "yes"], ids=repr
)
def test_cuda_graph_is_a_bool_or_none(value: Any) -> None:
    error = "cuda_graph must be True, False or None, got"
    with runs_forbidden(nested_model()), pytest.raises(ValueError, match=error):
        run(nested_model(), TOKENS, 2, cuda_graph=value)


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5), True, "0.5"], ids=repr)
def test_draft_stop_is_a_number(value: Any) -> None:
    error = "draft_stop must be a probability from 0 to 1, or None, got"
    with runs_forbidden(nested_model()), pytest.raises(ValueError, match=error):
        run(nested_model(), TOKENS, 2, draft_stop=value)


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        ({"seed": (5,)}, {"seed": [5]}),
        ({"seed": range(5, 6)}, {"seed": [5]}),
        ({"draft_stop": np.float64(0.5)}, {"draft_stop": 0.5}),
        ({"kv": np.str_("kv4/kv8")}, {"kv": "kv4/kv8"}),
    ],
)
def test_other_types_of_the_same_value(odd: dict[str, Any], plain: dict[str, Any]) -> None:
    fixed = {"do_sample": True, "max_new_tokens": 8, "seed": 5}
    outputs = [run(nested_model(), TOKENS, 2, **fixed | options) for options in (odd, plain)]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
