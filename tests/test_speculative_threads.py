"""Threads that decode with one model at the same time."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import small_models
import torch
from speculative_runs import nested_model, run
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Signals(BaseStreamer):
    """Says when decoding has begun, and then holds it until it may go on."""

    def __init__(self) -> None:
        self.begun = Event()
        self.may_go_on = Event()
        self.puts = 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the first is the prompt, which transformers puts
            self.begun.set()
            assert self.may_go_on.wait(timeout=60)

    def end(self) -> None:
        """Nothing is kept back."""


def test_the_first_call_may_end_before_the_second() -> None:
    model = copy.deepcopy(nested_model())
    prompts = small_models.tokens(model, 2, 9).split(1)
    expected = [run(model, prompt, gamma=3).sequences for prompt in prompts]
    with torch.no_grad():
        dense = model(prompts[0]).logits
    first, second = Signals(), Signals()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(run, model, prompts[0], 3, streamer=first)
        assert first.begun.wait(timeout=60)
        other = pool.submit(run, model, prompts[1], 3, streamer=second)
        assert second.begun.wait(timeout=60)
        first.may_go_on.set()
        outputs = [one.result(timeout=60)]
        second.may_go_on.set()
        outputs.append(other.result(timeout=60))

    for output, tokens in zip(outputs, expected, strict=True):
        assert torch.equal(output.sequences, tokens)
    with torch.no_grad():
        assert torch.equal(model(prompts[0]).logits, dense)


def test_calls_that_run_freely_give_their_own_tokens() -> None:
    model = nested_model()
    prompts = small_models.tokens(model, 8, 9).split(1)
    expected = [run(model, prompt, gamma=3).sequences for prompt in prompts]

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda prompt: run(model, prompt, gamma=3), prompts))

    for output, tokens in zip(outputs, expected, strict=True):
        assert torch.equal(output.sequences, tokens)
