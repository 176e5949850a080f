"""The promise that greedy equality rests on: a row's bits do not depend on the other rows.

Steps of one row and blocks of several, batches and prompts alone, small and large caches all give
bitwise equal logits, in both views. Dense models are checked too: there no rounding of activations
to INT8 hides a differing last bit of a norm or an activation function.
"""

import pytest
import small_models
import torch
from test_attention import nest_, span, step
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache

LENGTH = 11
CASES = [
    *((family, "small", {"hidden_size": 144}) for family in small_models.FAMILIES),
    ("llama-gqa", "small", {"hidden_size": 144, "head_dim": 24, "hidden_act": "gelu"}),
    ("llama-gqa", "small", {"hidden_size": 144, "head_dim": 80, "mlp_bias": True}),
    ("qwen3", "small", {"hidden_size": 144, "dtype": torch.bfloat16}),
    ("llama-gqa", "odd", {}),
    ("qwen2", "odd", {}),
]


def run(
    model: PreTrainedModel,
    ids: Tensor,
    blocks: list[int],
    view: str,
    policy: str = "kv4/kv8",
    capacity: int = LENGTH,
) -> Tensor:
    """Logits ``[B, LENGTH, V]`` of a prompt that is fed in blocks."""
    cache = NestedKVCache(model.config, capacity, batch_size=len(ids), policy=policy)
    out, start = [], 0
    for count in blocks:
        block = ids[:, start : start + count]
        out.append(step(model, cache, block, span(len(ids), start, count), view))
        start += count
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("view", ["target", "draft"])
@pytest.mark.parametrize(("family", "size", "options"), CASES)
def test_steps_blocks_and_batches_give_the_same_logits(
    family: str, size: str, options: dict, view: str
) -> None:
    model = nest_(small_models.build(family, size, **options))
    ids = small_models.tokens(model, batch=3, length=LENGTH)
    steps = run(model, ids[:1], [1] * LENGTH, view)

    assert torch.equal(run(model, ids[:1], [5, 5, 1], view), steps)
    assert torch.equal(run(model, ids[:1], [2, 9], view, capacity=150), steps)
    assert torch.equal(run(model, ids, [4, 1, 6], view, capacity=20)[:1], steps)


@pytest.mark.parametrize(("family", "size", "options"), CASES)
def test_dense_models_hold_the_promise_to_the_last_bit(
    family: str, size: str, options: dict
) -> None:
    model = small_models.build(family, size, **options)
    ids = small_models.tokens(model, batch=3, length=LENGTH)
    steps = run(model, ids[:1], [1] * LENGTH, "target")

    assert torch.equal(run(model, ids[:1], [5, 5, 1], "target"), steps)
    assert torch.equal(run(model, ids, [4, 1, 6], "target", capacity=20)[:1], steps)


@pytest.mark.parametrize("policy", ["kv8/kv8", "recent(3)"])
def test_drafts_of_every_policy_too(policy: str) -> None:
    model = nest_(small_models.build("llama-gqa"))
    ids = small_models.tokens(model, batch=3, length=LENGTH)
    steps = run(model, ids[:1], [1] * LENGTH, "draft", policy)

    assert torch.equal(run(model, ids, [4, 1, 6], "draft", policy, capacity=40)[:1], steps)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_left_padded_rows_are_the_prompts_alone(family: str, threads: int) -> None:
    model = nest_(small_models.build(family, hidden_size=144))
    ids = small_models.tokens(model, batch=3, length=LENGTH)
    lengths = [11, 7, 1]
    # A pad's position is negative; a row then goes on by itself, in blocks of four.
    positions = span(3, 0, LENGTH) - LENGTH + torch.tensor(lengths)[:, None]
    more = small_models.tokens(model, batch=3, length=8, seed=1)
    cache = NestedKVCache(model.config, LENGTH + 8, batch_size=3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prompt = step(model, cache, ids, positions)
        ends = torch.tensor(lengths)[:, None]
        blocks = [step(model, cache, more[:, i : i + 4], ends + span(3, i, 4)) for i in (0, 4)]
    finally:
        torch.set_num_threads(before)

    for row, length in enumerate(lengths):
        alone = torch.cat((ids[row, LENGTH - length :], more[row]))[None]
        expected = run(model, alone, [1] * (length + 8), "target", capacity=LENGTH + 8)[0]
        assert torch.equal(prompt[row, LENGTH - length :], expected[:length])
        assert torch.equal(torch.cat(blocks, dim=1)[row], expected[length:])


def test_the_logits_are_worth_comparing() -> None:
    """Views and positions differ by far more than rounding, so that equality says something."""
    model = nest_(small_models.build("llama-gqa", hidden_size=144))
    ids = small_models.tokens(model, batch=1, length=LENGTH)
    target, draft = (run(model, ids, [LENGTH], view) for view in ("target", "draft"))

    assert target.isfinite().all()
    assert (target - draft).abs().max() > 0.01
    assert (target[0, 1:] - target[0, :-1]).abs().amax(-1).min() > 0.01
