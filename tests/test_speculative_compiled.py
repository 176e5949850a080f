"""The compiled module computes, and gives the same tokens at any gamma."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import small_models
import torch
from nested_models import nest_
from speculative_runs import nested_model, padded_prompts, run

from nestq.speculative import decode


class CountingBackend:
    """A backend for torch.compile that counts graphs and calls of them."""

    def __init__(self, inner: str) -> None:
        self.inner = torch._dynamo.lookup_backend(inner)
        self.graphs = 0
        self.calls = 0

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        compiled = self.inner(module, inputs)
        self.graphs += 1

        def call(*args: Any) -> Any:
            self.calls += 1
            return compiled(*args)

        return call


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_every_forward_pass_is_a_compiled_call() -> None:
    model = copy.deepcopy(nested_model())
    tokens, mask = padded_prompts(model, [0, 3], 9)
    eager = run(model, tokens, gamma=3, attention_mask=mask)
    backend = CountingBackend("eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    output = run(compiled, tokens, gamma=3, attention_mask=mask)
    assert torch.equal(output.sequences, eager.sequences)
    rounds = output.metrics.verifications
    assert backend.calls == 1 + rounds * (3 + 1)
    graphs = backend.graphs
    assert graphs == 3  # prefill, draft step, verification

    run(compiled, tokens, gamma=3, attention_mask=mask)
    assert backend.graphs == graphs
    # The wrapper's own generate is bound to the module inside, which is not compiled.
    calls = backend.calls
    compiled.generate(tokens, attention_mask=mask, max_new_tokens=4, custom_generate=decode)
    assert backend.calls == calls


@pytest.mark.parametrize("kv", ["16/16+streaming(2,4)", "kv4/kv8+snapkv(34)", "16/16+snapkv(34)"])
def test_sparse_drafts_are_compiled(kv: str) -> None:
    model = copy.deepcopy(nested_model())
    tokens, mask = padded_prompts(model, [0, 3], 40)
    options: dict[str, Any] = {"attention_mask": mask, "kv": kv, "max_new_tokens": 6}
    eager = run(model, tokens, gamma=3, **options)
    backend = CountingBackend("eager")
    output = run(torch.compile(model, backend=backend, fullgraph=True), tokens, 3, **options)
    assert torch.equal(output.sequences, eager.sequences)
    assert output.metrics.accepted_per_position == eager.metrics.accepted_per_position
    assert backend.graphs == 3


def test_a_model_compiled_in_place() -> None:
    model = copy.deepcopy(nested_model())
    tokens = small_models.tokens(model, 1, 9)
    eager = run(model, tokens, gamma=3)
    backend = CountingBackend("eager")
    model.compile(backend=backend, fullgraph=True)
    output = run(model, tokens, gamma=3)
    assert torch.equal(output.sequences, eager.sequences)
    assert backend.calls == 1 + output.metrics.verifications * 4
    options: dict[str, Any] = {"custom_generate": decode, "gamma": 3, "max_new_tokens": 4}
    calls = backend.calls
    model.generate(tokens, **options)
    assert backend.calls > calls


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_tokens_of_inductor_do_not_depend_on_gamma(family: str) -> None:
    model = nest_(small_models.build(family, num_hidden_layers=1))
    compiled = torch.compile(model)
    tokens, mask = padded_prompts(model, [0, 3], 9)
    options: dict[str, Any] = {"attention_mask": mask, "eos_token_id": None}
    expected = run(compiled, tokens, gamma=0, **options).sequences
    for gamma in (2, 4):
        output = run(compiled, tokens, gamma, **options)
        assert torch.equal(output.sequences, expected)
        assert 0 < output.metrics.accepted < output.metrics.drafted
