"""A traced model computes what the model does, and is traced once for a view and kind of shape."""

import copy

import pytest
import small_models
import torch
from speculative_runs import nested_model
from torch import Tensor

from nestq.attention import nested_attention_implementation
from nestq.kv_cache import NestedKVCache
from nestq.passes import backend
from nestq.speculative.round import NestedForward


def logits(model: torch.nn.Module, forward: object, capacity: int, batch: int = 2) -> list[Tensor]:
    """Of a block, of two blocks of other sizes, and of a draft step."""
    cache = NestedKVCache(model.config, capacity, batch_size=batch)
    pads = torch.tensor([[0], [2], [1]])[:batch]
    nested = NestedForward(model, forward, cache, pads)  # type: ignore[arg-type]
    found = []
    with torch.no_grad(), nested_attention_implementation(model):
        start = 0
        for view, count in (("target", 5), ("target", 3), ("target", 4), ("draft", 1)):
            columns = torch.arange(start, start + count).expand(batch, -1)
            tokens = small_models.tokens(model, batch, count)
            found.append(nested(view, tokens, columns))  # type: ignore[arg-type]
            start += count
    return found


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2", "qwen3", "mistral", "phi3"])
def test_a_traced_model_has_the_bits_of_the_model(family: str) -> None:
    torch._dynamo.reset()
    model = copy.deepcopy(nested_model(family))
    expected = logits(model, model, 32)
    ours = logits(model, backend.traced(model), 32)
    assert all(map(torch.equal, ours, expected))


def test_lengths_and_capacities_share_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = copy.deepcopy(nested_model())
    counts: list[dict[str, int]] = []

    def counting(graph: torch.fx.Graph) -> dict[str, int]:
        counts.append(run_passes(graph))
        return counts[-1]

    run_passes = backend.run_passes
    monkeypatch.setattr(backend, "run_passes", counting)
    for capacity in (32, 48):
        logits(model, backend.traced(model), capacity)
    traces = len(counts)
    assert all(count["nested_kv"] == len(model.model.layers) for count in counts)
    assert traces <= 7
    logits(model, backend.traced(model), 64)
    logits(model, backend.traced(model), 80)
    assert len(counts) == traces
    # Of another batch, and of another model, sizes are symbols; the passes fuse as much.
    logits(model, backend.traced(model), 64, batch=3)
    other = copy.deepcopy(model)
    logits(other, backend.traced(other), 96, batch=1)
    assert all(count == counts[0] for count in counts)
