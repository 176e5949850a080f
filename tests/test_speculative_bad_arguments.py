"""Arguments that nobody means: each gives one clear error, before the model runs where possible."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import nested_model, run
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from nestq.attention import IMPLEMENTATION
from nestq.speculative import decode, speculative_generate
from nestq.view import current_view

TOKENS = small_models.tokens(nested_model(), 2, 6)
CONTEXT = nested_model().config.max_position_embeddings
NAN = float("nan")


def dense() -> PreTrainedModel:
    return small_models.build("llama-gqa")


def on_meta() -> PreTrainedModel:
    return copy.deepcopy(nested_model()).to("meta")


def partly_on_meta() -> PreTrainedModel:
    model = copy.deepcopy(nested_model())
    model.model.layers[1].to("meta")
    return model


# Keyword arguments, or a function that makes a model; and the error.
BAD: dict[str, tuple[Any, str]] = {
    "gamma -1": ({"gamma": -1}, "gamma must be an int from 0 to 16, got -1"),
    "gamma 1.5": ({"gamma": 1.5}, "gamma must be an int from 0 to 16, got 1.5"),
    "gamma x": ({"gamma": "x"}, "gamma must be an int from 0 to 16, or 'auto', got 'x'"),
    "new tokens -1": ({"max_new_tokens": -1}, "max_new_tokens must be an int >= 1, got -1"),
    "new tokens 0": ({"max_new_tokens": 0}, "max_new_tokens must be an int >= 1, got 0"),
    "new tokens 1.5": ({"max_new_tokens": 1.5}, "max_new_tokens must be an int >= 1, got 1.5"),
    "new tokens x": ({"max_new_tokens": "x"}, "max_new_tokens must be an int >= 1, got 'x'"),
    "length -3": (
        {"max_new_tokens": None, "max_length": -3},
        "max_length must be an int >= 1, got -3",
    ),
    "length of less than the prompt": (
        {"max_new_tokens": None, "max_length": 6},
        "Input length of input_ids is 6, but `max_length` is set to 6",
    ),
    "minimum -2": ({"min_length": -2}, "min_length must be an int >= 0, got -2"),
    "new minimum -2": ({"min_new_tokens": -2}, "min_new_tokens must be an int >= 0, got -2"),
    "time -1": ({"max_time": -1.0}, "max_time must be a number of seconds >= 0, got -1.0"),
    "time nan": ({"max_time": NAN}, "max_time must be a number of seconds >= 0, got nan"),
    "time x": ({"max_time": "x"}, "max_time must be a number of seconds >= 0, got 'x'"),
    "chunk -1": ({"prefill_chunk_size": -1}, "prefill_chunk_size must be an int >= 1, got -1"),
    "sequences -1": ({"num_return_sequences": -1}, "num_return_sequences must be an int >= 1"),
    "empty prompt": ({"input_ids": TOKENS[:, :0]}, "input_ids must hold at least one token a row"),
    "prompt beyond the context": (
        {"input_ids": torch.ones(1, CONTEXT, dtype=torch.int64)},
        f"prompt and new tokens may be {CONTEXT + 4} together, .* is {CONTEXT}",
    ),
    "id beyond the vocabulary": (
        {"input_ids": torch.tensor([[5, 97]])},
        "input_ids must be from 0 to 96 for LlamaForCausalLM, got 5 to 97",
    ),
    "id below 0": (
        {"input_ids": torch.tensor([[5, -100]])},
        "input_ids must be from 0 to 96 for LlamaForCausalLM, got -100 to 5",
    ),
    "ids on the meta device": (
        {"input_ids": TOKENS.to("meta")},
        "input_ids must hold numbers, got a tensor on the meta device",
    ),
    "mask of another shape": (
        {"attention_mask": torch.ones(2, 5)},
        r"attention_mask .*must have the shape of input_ids, \(2, 6\), got \(2, 5\)",
    ),
    "mask on the meta device": (
        {"attention_mask": torch.ones(2, 6, device="meta")},
        "attention_mask must hold numbers, got a tensor on the meta device",
    ),
    "mask of another number": (
        {"attention_mask": torch.full((2, 6), 2)},
        "attention_mask must hold 0 and 1 only",
    ),
    "mask of nan": (
        {"attention_mask": torch.full((2, 6), NAN)},
        "attention_mask must hold 0 and 1 only",
    ),
    "draft that is the target": (
        dense,
        "gamma must be 0 for Llama.* with kv='16/16', got 4: its draft would be the target itself",
    ),
    "model on the meta device": (on_meta, "model must hold numbers, and LlamaForCausalLM is on"),
    "model on two devices": (
        partly_on_meta,
        r"on one device, got model\.embed_tokens\.weight on cpu, model\.layers\.1\..* on meta",
    ),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(bad: Any, message: str) -> None:
    model = bad() if callable(bad) else nested_model()
    options = {"input_ids": TOKENS, "max_new_tokens": 4, **({} if callable(bad) else bad)}
    with runs_forbidden(model), pytest.raises(ValueError, match=message) as caught:
        speculative_generate(model, **options)
    assert "\n" not in str(caught.value)


# What transformers lets through to the loop is refused there in the same words.
@pytest.mark.parametrize(
    "name",
    [
        *("gamma -1", "gamma 1.5", "gamma x", "minimum -2", "time -1", "time nan"),
        *("prompt beyond the context", "id beyond the vocabulary", "id below 0"),
        *("mask of another shape", "draft that is the target", "model on two devices"),
    ],
)
def test_bad_arguments_of_the_loop(name: str) -> None:
    bad, message = BAD[name]
    model = bad() if callable(bad) else nested_model()
    options = {"input_ids": TOKENS, "max_new_tokens": 4, **({} if callable(bad) else bad)}
    with runs_forbidden(model), pytest.raises(ValueError, match=message):
        model.generate(custom_generate=decode, **options)


class runs_forbidden:  # noqa: N801 (used like torch.no_grad)
    """Context in which the model must not run, and after which nothing is left set."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __enter__(self) -> None:
        def forbid(*_: Any) -> None:
            pytest.fail("the model ran")

        self.handle = self.model.register_forward_pre_hook(forbid)

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()
        assert current_view() == "target"
        assert self.model.config._attn_implementation != IMPLEMENTATION


class Columns(BaseStreamer):
    def __init__(self) -> None:
        self.columns: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.columns.append(value.tolist())

    def end(self) -> None:
        """Nothing is kept back."""


SPOILED: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
    "the embedding": lambda model: model.model.embed_tokens.weight[3:60],
    "a norm": lambda model: model.model.layers[0].input_layernorm.weight[3],
    "scales of a linear": lambda model: model.model.layers[1].mlp.down_proj.weight.scale[0],
    "one row of the head": lambda model: model.lm_head.weight.scale[7],
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("name", SPOILED)
def test_weights_of_nan(name: str, gamma: int, do_sample: bool) -> None:
    model = copy.deepcopy(nested_model())
    with torch.no_grad():
        SPOILED[name](model).fill_(NAN)
    streamer = Columns()
    message = r"no token can be chosen: .* hold NaN or .* in row\(s\) 0, 1; look for NaN"
    with pytest.raises(ValueError, match=message):
        run(model, TOKENS, gamma, do_sample=do_sample, streamer=streamer)
    assert streamer.columns == [TOKENS.tolist()]  # the prompt, and no token
    assert current_view() == "target"
    assert model.config._attn_implementation != IMPLEMENTATION


@pytest.mark.parametrize("gamma", [0, 3])
def test_scores_of_nan_matter_from_the_token_on_that_they_choose(gamma: int) -> None:
    """A row may end before it, and a draft of NaN is merely rejected."""
    model = nested_model()
    expected = run(model, TOKENS, gamma=0, max_new_tokens=4).sequences

    def spoil(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        output.logits[1, kwargs["position_ids"][1, -output.logits.shape[1] :] == 9] = torch.nan
        if current_view() == "draft":
            output.logits[0] = torch.nan

    handle = model.register_forward_hook(spoil, with_kwargs=True)
    try:
        output = run(model, TOKENS, gamma, max_new_tokens=4)
        assert torch.equal(output.sequences, expected)
        with pytest.raises(ValueError, match=r"in row\(s\) 1;"):
            run(model, TOKENS, gamma, max_new_tokens=5)
        ends = run(model, TOKENS, gamma, eos_token_id=int(expected[1, 9]), max_new_tokens=6)
        assert torch.equal(ends.sequences[1, :10], expected[1])
    finally:
        handle.remove()


def test_a_greedy_choice_that_processors_leave_empty() -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=r"leave no token in row\(s\) 0, 1;"):
        run(model, TOKENS, 2, suppress_tokens=list(range(97)))
