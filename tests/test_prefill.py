"""Prompts through a traced model: the bits of the model, in pieces too, and one trace for all."""

from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import torch
from nested_models import nest_
from speculative_runs import padded_prompts
from torch import Tensor
from transformers import PreTrainedModel

from nestq.attention import nested_attention_implementation
from nestq.kv_caches import new_cache, reading_prompt
from nestq.kv_policy import KVPolicy
from nestq.passes import backend
from nestq.speculative.prefill import (
    ACTIVATION_BYTES,
    LEAST_COLUMNS,
    prompt_columns,
    prompt_forward,
)
from nestq.speculative.prompts import Prompt, prefill, read_prompt
from nestq.speculative.round import NestedForward

FAMILIES = ["llama-gqa", "qwen2", "qwen3", "phi3", "mistral", "gemma2"]


def build(family: str) -> PreTrainedModel:
    options: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    if family == "gemma2":
        # A cap of scores is not supported; every second layer has a window.
        options |= {"attn_logit_softcapping": None, "num_hidden_layers": 2, "sliding_window": 8}
    return nest_(small_models.build(family, **options))


@torch.no_grad()
def cached(
    model: PreTrainedModel, forward: Any, length: int, chunk: int | None, kv: str = "kv8/kv8"
) -> list[Tensor]:
    """All tensors of a cache after a prompt of two rows, one of which has pads."""
    tokens, mask = padded_prompts(model, [0, 3], length + 1)
    prompt = read_prompt(model, tokens, {"attention_mask": mask}, chunk)
    cache = new_cache(KVPolicy.parse(kv), model.config, 1056, 2, model.device, model.dtype)
    nested = NestedForward(model, forward, cache, prompt.pads)
    with nested_attention_implementation(model), reading_prompt(cache):
        prefill(nested, prompt, chunk)
    assert cache.lengths.tolist() == [length, length - 3]
    return tensors_of(cache)


def tensors_of(part: Any) -> list[Tensor]:
    """All that a cache, a layer or planes hold."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, list | tuple):
        return [tensor for one in part for tensor in tensors_of(one)]
    if type(part).__module__.startswith("nestq"):
        return tensors_of([value for name, value in vars(part).items() if name != "_queries"])
    return []


@pytest.mark.parametrize("family", FAMILIES)
def test_one_trace_gives_the_bits_of_the_model_at_all_lengths(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    traces: list[dict[str, int]] = []
    run_passes = backend.run_passes
    monkeypatch.setattr(
        backend, "run_passes", lambda graph: traces.append(run_passes(graph)) or traces[-1]
    )
    model = build(family)
    traced = backend.traced(model)
    # A thousand tokens of one family, since a CPU takes its time.
    for length in (7, 64, 1000 if family == "llama-gqa" else 150):
        ours, theirs = (cached(model, forward, length, None) for forward in (traced, model))
        assert len(ours) > 5
        assert all(map(torch.equal, ours, theirs))
    assert len(traces) == 1
    assert traces[0]["nested_kv"] == model.config.num_hidden_layers


@pytest.mark.parametrize("kv", ["kv8/kv8", "quantspec", "16/16+snapkv(64)"])
def test_pieces_give_the_bits_of_the_whole(kv: str) -> None:
    torch._dynamo.reset()
    model = build("llama-gqa")
    traced = prompt_forward(model, model, decoding(), in_graph=True)
    assert traced is not model
    whole = cached(model, model, 100, None, kv)
    for chunk in (41, 64):
        assert all(map(torch.equal, cached(model, traced, 100, chunk, kv), whole))


def decoding(untraceable: bool = False) -> Any:
    """Of a captured decoding what matters here."""
    return SimpleNamespace(untraceable=untraceable)


def test_prompts_are_traced_where_rounds_are() -> None:
    model = build("llama-gqa")

    def forward(**inputs: Any) -> Any:
        return model(**inputs)

    assert prompt_forward(model, model, decoding(), in_graph=False) is model
    assert prompt_forward(model, forward, decoding(), in_graph=True) is forward
    assert prompt_forward(model, model, decoding(untraceable=True), in_graph=True) is model
    model.compile()
    assert prompt_forward(model, model, decoding(), in_graph=True) is model


def test_a_model_that_cannot_be_traced_computes_itself_and_says_so_once() -> None:
    torch._dynamo.reset()
    model = build("llama-gqa")
    expected = cached(model, model, 20, 8)
    model.model.layers[0].register_forward_pre_hook(lambda *_: print(end=""))
    model.model.layers[0].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    captured = decoding()
    with pytest.warns(UserWarning, match="cannot be traced for prompts") as warned:
        ours = cached(model, prompt_forward(model, model, captured, in_graph=True), 20, 8)
    assert len(warned) == 1
    assert captured.untraceable
    assert all(map(torch.equal, ours, expected))


def test_long_prompts_are_read_in_pieces() -> None:
    model = build("llama-gqa")
    tokens = small_models.tokens(model, 3, 5)
    prompt = Prompt(tokens, torch.zeros(3, 1, dtype=torch.int64), 0, {})
    # Gate and up of 100 numbers each, in 4 bytes, of three rows.
    assert prompt_columns(model, prompt, None) == ACTIVATION_BYTES // (3 * 200 * 4)
    assert prompt_columns(model, prompt, 7) == 7
    model.config.intermediate_size = 1 << 20
    assert prompt_columns(model, prompt, None) == LEAST_COLUMNS
    images = Prompt(tokens, prompt.pads, 0, {"inputs_embeds": torch.zeros(3, 5, 48)})
    assert prompt_columns(model, images, None) is None
