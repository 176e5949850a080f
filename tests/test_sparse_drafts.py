"""What sparse drafts attend to: a plain model in float64 with that as its mask has their logits."""

from typing import Any

import pytest
import small_models
import torch
from speculative_runs import cache_of, run
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_policy import KVPolicy
from nestq.snapkv_cache import kept_positions, prompt_votes
from nestq.sparse_reads import StreamingLLM
from nestq.view import current_view

HEADS, KV_HEADS, GAMMA = 4, 2, 4
WIDTH = 60  # the last token is read in the first round
WINDOW, REACH = 32, 3  # as the paper's: the last queries, and 7 positions wide
# Attention rounds to 2^-21 of the largest element, and norms compute in float32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """One layer: its keys and values depend on nothing that a draft reads."""
    model = small_models.build("llama-gqa", dtype=torch.float64, num_hidden_layers=1)
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def first_drafts(model: PreTrainedModel, tokens: Tensor, kv: str) -> tuple[Tensor, Any]:
    """Logits ``[GAMMA, V]`` of the first round's drafts, and the cache of the call."""
    logits: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        if current_view() == "draft":
            logits.append(output.logits[0, -1])

    hook = model.register_forward_hook(keep)
    output = run(model, tokens, GAMMA, kv=kv, max_new_tokens=1)
    hook.remove()
    return torch.stack(logits), cache_of(output)


@torch.no_grad()
def plain_drafts(model: PreTrainedModel, tokens: Tensor, visible: Tensor) -> Tensor:
    """The same of the model itself, greedily, through a mask ``[HEADS, T, T]``."""
    logits = []
    for count in range(tokens.shape[1], tokens.shape[1] + GAMMA):
        seen = visible[:, :count, :count] & torch.ones(count, count).tril().bool()
        mask = torch.zeros(1, HEADS, count, count, dtype=torch.float64)
        mask.masked_fill_(~seen, -torch.inf)
        logits.append(model(tokens, attention_mask=mask).logits[0, -1])
        tokens = torch.cat((tokens, logits[-1].argmax()[None, None]), 1)
    return torch.stack(logits)


@torch.no_grad()
def best_positions(model: PreTrainedModel, prompt: Tensor, budget: int) -> list[list[int]]:
    """What each KV head keeps of a prompt, by the attention weights of transformers."""
    weights = model(prompt, output_attentions=True).attentions[0][0]
    length = prompt.shape[1]
    kept = []
    for head in range(KV_HEADS):
        group = range(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
        votes = [
            sum(float(weights[h, q, j]) for h in group for q in range(length - WINDOW, length))
            for j in range(length - WINDOW)
        ]
        pooled = [max(votes[max(j - REACH, 0) : j + REACH + 1]) for j in range(len(votes))]
        order = sorted(range(len(votes)), key=lambda j: (-pooled[j], j))
        last = range(length - WINDOW, length)
        kept.append(sorted(order[: budget - WINDOW]) + list(last))
    return kept


@pytest.mark.parametrize(("sink", "recent"), [(4, 8), (0, 1), (20, 3), (2, 50)])
def test_streaming_llm(model: PreTrainedModel, sink: int, recent: int) -> None:
    tokens = small_models.tokens(model, 1, WIDTH)
    slots = torch.arange(WIDTH + GAMMA)
    near = (slots < sink) | (slots > slots[:, None] - recent)
    near[: WIDTH - 1] = True  # the target has read the prompt
    expected = plain_drafts(model, tokens, near.expand(HEADS, -1, -1))
    logits, _ = first_drafts(model, tokens, f"16/16+streaming({sink},{recent})")
    assert (logits - expected).abs().max() < TOLERANCE
    whole = plain_drafts(model, tokens, torch.ones_like(near).expand(HEADS, -1, -1))
    assert (logits[0] - whole[0]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("budget", [33, 40, 58])
def test_snapkv(model: PreTrainedModel, budget: int) -> None:
    tokens = small_models.tokens(model, 1, WIDTH)
    prompt = tokens[:, :-1]
    kept = best_positions(model, prompt, budget)
    visible = torch.ones(HEADS, WIDTH + GAMMA, WIDTH + GAMMA, dtype=torch.bool)
    for head in range(HEADS):
        hidden = sorted(set(range(WIDTH - 1)) - set(kept[head * KV_HEADS // HEADS]))
        visible[head, WIDTH - 1 :, hidden] = False
    expected = plain_drafts(model, tokens, visible)
    logits, cache = first_drafts(model, tokens, f"16/16+snapkv({budget})")
    assert (logits - expected).abs().max() < TOLERANCE
    assert kept[0] != kept[1]
    # The copy holds the kept entries in order, then the last token of the prompt.
    index = torch.tensor([[*positions, WIDTH - 1] for positions in kept])
    for name in ("keys", "values"):
        copied = getattr(cache.compact.layers[0], name)[0, :, : budget + 1]
        whole = getattr(cache.full.layers[0], name)[0]
        assert torch.equal(copied, whole.gather(1, index[..., None].expand_as(copied)))
    room = 1 + GAMMA + 2  # the new token and those of a round, and the prompt's last
    assert cache.compact.get_max_length() == min(budget + room, WIDTH + 1 + GAMMA + 1)


@pytest.mark.parametrize("length", [33, 40, 75])
def test_votes_are_sums_of_attention_weights(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(HEADS, WINDOW, 8, generator=generator)
    keys = torch.randn(KV_HEADS, length, 8, generator=generator)
    votes = prompt_votes(queries, keys)
    assert votes.shape == (KV_HEADS, length - WINDOW)
    for head in range(KV_HEADS):
        expected = torch.zeros(length - WINDOW, dtype=torch.float64)
        for query in queries.view(KV_HEADS, -1, WINDOW, 8)[head].double():
            for i in range(WINDOW):
                seen = keys[head, : length - WINDOW + i + 1].double()
                expected += (seen @ query[i]).softmax(0)[: length - WINDOW]
        pooled = [expected[max(j - REACH, 0) : j + REACH + 1].max() for j in range(len(expected))]
        # Scores are off by a few units of 2^-24 of about 10, in float32.
        torch.testing.assert_close(votes[head].double(), torch.stack(pooled), rtol=1e-4, atol=0)


def test_the_earlier_of_equals_are_kept() -> None:
    votes = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    kept = kept_positions(votes, WINDOW + 2)
    assert kept[:, :2].tolist() == [[1, 2], [0, 1]]
    assert kept[:, 2:].tolist() == [list(range(5, 5 + WINDOW))] * 2


def test_nested_planes_are_copied_code_by_code(model: PreTrainedModel) -> None:
    tokens = small_models.tokens(model, 1, WIDTH)
    _, cache = first_drafts(model, tokens, "kv4/kv8+snapkv(34)")
    for side in ("key_planes", "value_planes"):
        full, compact = (getattr(one.layers[0], side) for one in (cache.full, cache.compact))
        for name in ("base", "refinement", "scale"):
            whole, copied = getattr(full, name)[0], getattr(compact, name)[0]
            assert torch.equal(copied[:, 2:35], whole[:, WIDTH - 33 : WIDTH])
            for head in range(KV_HEADS):
                assert any(torch.equal(copied[head, 0], entry) for entry in whole[head, :-33])


def test_rows_are_selected_and_reordered_in_both() -> None:
    model = small_models.build("llama-gqa", num_hidden_layers=1)
    output = run(model, small_models.tokens(model, 2, WIDTH), 2, kv="16/16+snapkv(34)")
    cache: Any = cache_of(output)
    before = [cache.full.layers[0].keys.clone(), cache.compact.layers[0].keys.clone()]
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1, 2]))
    for one, keys in zip((cache.full, cache.compact), before, strict=True):
        assert torch.equal(one.layers[0].keys, keys[[1, 0]])
    assert len(cache.lengths) == 2
    cache.reset()
    assert not cache.lengths.any()
    with pytest.raises(TypeError, match=r"inside SnapKVCache\.at\(positions\) only"):
        cache.update(*torch.zeros(2, 2, 2, 1, 16), 0)


def test_strings() -> None:
    assert str(KVPolicy("kv4", 0, StreamingLLM(4, 8))) == "kv4/kv8+streaming(4,8)"
