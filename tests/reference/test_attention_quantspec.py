"""The reference attention over QuantSpec's cache: near plain attention, and the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nested_kv import random
from quantspec_cache import Cache, plain_attention, random_cache
from torch import Tensor

from nestq.reference.attention_quantspec import (
    QUERY_STEPS,
    RECENT_FACTOR_STEPS,
    RECENT_STEPS,
    WEIGHT_STEPS,
    quantspec_attention,
)
from nestq.reference.kv_quantspec import GROUP, first_recent

SHAPES = [(4, 2, 16), (3, 1, 64), (2, 2, 80), (2, 1, 128), (1, 1, 256)]  # heads, KV heads, D


def attend(query: Tensor, positions: Tensor, cache: Cache, window: int = 0) -> Tensor:
    """The function under test with the usual scaling."""
    scaling = query.shape[-1] ** -0.5
    return quantspec_attention(query, positions, *cache.arguments(), scaling, window)


def error_budget(query: Tensor, cache: Cache, scaling: float) -> float:
    """How far fixed point may be from exact arithmetic.

    A product of channels is off by at most what the largest of its D products are by rounding a
    factor of them, which moves a score by up to delta and a weight, relative to the others, by a
    factor of up to exp(2 delta). A weight code is off by half a step, in the numerator and in the
    denominator, which is at least one whole weight.
    """
    numbers = [
        torch.cat([x.double().nan_to_num().abs().flatten() for x in (8 * scale, zero, recent)])
        for (_, _, scale, zero), recent in (
            (cache.keys, cache.recent_keys),
            (cache.values, cache.recent_values),
        )
    ]
    largest_key, largest_value = (2 * x.max().item() for x in numbers)
    largest_score = query.shape[-1] * query.abs().max().item() * largest_key * scaling
    # Quantized keys round their query, recent ones also themselves.
    delta = largest_score * max(1 / QUERY_STEPS, 1 / RECENT_FACTOR_STEPS + 1 / RECENT_STEPS)
    tokens = cache.keys[0].shape[2] + 2 * GROUP
    weights = 2 * tokens / WEIGHT_STEPS + 2 * GROUP * (1 / RECENT_FACTOR_STEPS + 1 / RECENT_STEPS)
    return largest_value * (4 * delta + weights + 2**-44)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("window", [0, 1, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_plain_attention_over_what_positions_say(
    shape: tuple[int, int, int], window: int, draft: bool
) -> None:
    """Among the queries are the last before and the first at a multiple of a group."""
    heads, kv_heads, head_dim = shape
    query = random(2, heads, 5, head_dim, seed=7).double()
    positions = torch.tensor([[509, 510, 511, 512, 513], [-1, 254, 255, 256, 257]])
    cache = random_cache(kv_heads, head_dim, positions, 2 * GROUP + 4)
    cache = cache.draft() if draft else cache

    out = attend(query, positions, cache, window)
    expected = plain_attention(query, positions, cache, head_dim**-0.5, window)

    budget = error_budget(query, cache, head_dim**-0.5)
    assert (out - expected).abs().max() <= budget
    # The budget is far below what reading another precision, or token, would change.
    assert budget < 1e-3


def test_sums_over_more_than_one_block_of_keys() -> None:
    positions = torch.tensor([[2499, 1500]])
    cache = random_cache(1, 16, positions, 2 * GROUP + 1000)
    query = random(1, 2, 2, 16, seed=7).double() / 8  # flat: every block counts
    expected = plain_attention(query, positions, cache, 0.25)

    assert (attend(query, positions, cache) - expected).abs().max() <= error_budget(
        query, cache, 0.25
    )


@st.composite
def calls(draw: st.DrawFn) -> dict:
    """A call of n queries a row, some of them pads, at the end of each row."""
    heads, kv_heads, head_dim = draw(st.sampled_from(SHAPES))
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    end = st.sampled_from([1, 127, 129, 255, 256, 257, 260, 383, 385, 700]) | st.integers(0, 700)
    ends = [draw(end) for _ in range(batch)]
    positions = torch.tensor([[max(-1, end - count + i) for i in range(count)] for end in ends])
    seed = draw(st.integers(0, 2**31))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    cache = random_cache(kv_heads, head_dim, positions, 2 * GROUP + count, 701, seed)
    return {
        "query": random(batch, heads, count, head_dim, seed=seed + 9).to(dtype),
        "positions": positions,
        "cache": cache.draft() if draw(st.booleans()) else cache,
        "window": draw(st.sampled_from([0, 6, 300])),
    }


def moved(cache: Cache, positions: Tensor, slots: int) -> Cache:
    """The tokens that a row of positions reads in a buffer of another size, and larger planes."""
    tokens = torch.arange(max(int(first_recent(positions[positions >= 0].min())), 0),
                          int(positions.max()) + 1)  # fmt: skip
    buffers = []
    for buffer in (cache.recent_keys, cache.recent_values):
        larger = buffer.new_full((*buffer.shape[:2], slots, buffer.shape[3]), torch.nan)
        larger[:, :, tokens % slots] = buffer[:, :, tokens % buffer.shape[2]]
        buffers.append(larger)
    planes = []
    for group in (cache.keys, cache.values):
        rest = (None if x is None else torch.full_like(x, 77) for x in group)
        planes.append(
            tuple(
                None if x is None else torch.cat((x, y), 2)
                for x, y in zip(group, rest, strict=True)
            )
        )
    return Cache(*planes, *buffers)


@settings(max_examples=25, deadline=None)
@given(calls())
def test_a_row_has_the_same_bits_alone_and_in_larger_planes_and_buffers(call: dict) -> None:
    together = attend(**call)
    query, positions, cache = (call[name] for name in ("query", "positions", "cache"))
    for b in range(query.shape[0]):
        row = slice(b, b + 1)
        for i in range(query.shape[2]):
            if positions[b, i] < 0:
                assert not together[b, :, i].any()
                continue
            alone = positions[row, i : i + 1]
            elsewhere = moved(cache.rows(row), alone, 512 + i)
            out = attend(query[row, :, i : i + 1], alone, elsewhere, call["window"])
            assert torch.equal(out[0, :, 0], together[b, :, i])
            assert not out.isnan().any()


def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(monkeypatch) -> None:
    """A prompt's own keys and values may serve as its buffer."""
    positions = torch.arange(400)[None]
    whole = random_cache(1, 16, positions, 400)
    query = random(1, 2, 400, 16, seed=7).double()
    prompt = attend(query, positions, whole)
    for p in (0, 127, 128, 255, 256, 257, 383, 384, 399):
        at = positions[:, p : p + 1]
        out = attend(query[:, :, p : p + 1], at, moved(whole, at, 256))
        assert torch.equal(out[:, :, 0], prompt[:, :, p])
    monkeypatch.setattr("nestq.reference.attention_quantspec.SCORES_A_PIECE", 900 * 7)
    assert torch.equal(attend(query, positions, whole), prompt)


def test_the_draft_cannot_see_the_lower_nibble_nor_anyone_a_group_too_early() -> None:
    positions = torch.tensor([[383, 384]])
    query = random(1, 4, 2, 16, seed=7)
    cache = random_cache(2, 16, positions, 2 * GROUP + 1)
    target, draft = attend(query, positions, cache), attend(query, positions, cache.draft())
    assert not torch.equal(draft, target)
    # Group 1 is read quantized at 384, and in full precision at 383.
    for planes in (cache.keys, cache.values):
        assert planes[1] is not None
        planes[1][:, :, GROUP : 2 * GROUP] ^= 0xFF
    changed = attend(query, positions, cache)
    assert torch.equal(changed[:, :, 0], target[:, :, 0])
    assert (changed[:, :, 1] != target[:, :, 1]).any(-1).all()
    assert torch.equal(attend(query, positions, cache.draft()), draft)


def test_nan_that_is_seen_shows() -> None:
    positions = torch.tensor([[383, 384]])
    query = random(1, 2, 2, 16, seed=7)
    cache = random_cache(2, 16, positions, 2 * GROUP + 1)
    for tensor, seen in (
        (cache.keys[3][:, :, 1], [False, True]),
        (cache.values[2][:, :, GROUP], [False, True]),
        (cache.recent_keys[:, :, 200], [True, False]),
        (cache.recent_values[:, :, 384 % 257], [False, True]),
    ):
        kept = tensor.clone()
        tensor[..., 0] = torch.nan
        nan = attend(query, positions, cache).isnan()
        tensor.copy_(kept)
        assert [bool(nan[:, :, i].all()) for i in range(2)] == seen
        assert [bool(nan[:, :, i].any()) for i in range(2)] == seen


def test_zero_queries_average_and_no_queries_give_no_rows() -> None:
    positions = torch.tensor([[300]])
    cache = random_cache(1, 16, positions, 256)
    query = torch.zeros(1, 1, 1, 16, dtype=torch.float64)
    expected = plain_attention(query, positions, cache, 0.25)
    torch.testing.assert_close(
        attend(query, positions, cache), expected, rtol=0, atol=error_budget(query, cache, 0.25)
    )
    assert attend(query[:, :, :0], positions[:, :0], cache).shape == (1, 1, 0, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 2, 16)}, "H a multiple of H_kv"),
        ({"query": torch.zeros(1, 4, 2, 18)}, "query must be"),
        ({"positions": torch.tensor([[300, 640]])}, "got 640"),
        ({"positions": torch.tensor([[127, 299]])}, "as the queries of a row read, 300, got 257"),
        ({"positions": torch.tensor([[0]])}, "positions must be int64 of shape"),
        ({"recent_values": torch.zeros(1, 2, 256, 16)}, "recent_values must be"),
        ({"recent_keys": torch.zeros(1, 2, 257, 16).long()}, "recent_keys must be"),
        ({"key_zero": torch.zeros(1, 2, 2, 16)}, "key zero must be"),
        ({"value_scale": torch.zeros(1, 2, 384, 2)}, "value scale must be"),
        ({"value_refinement": None}, "must both be given or both be None"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    positions = torch.tensor([[299, 300]])
    cache = random_cache(2, 16, positions, 2 * GROUP + 1)
    names = [
        f"{name}_{part}"
        for name in ("key", "value")
        for part in ("base", "refinement", "scale", "zero")
    ]
    arguments = {
        "query": torch.zeros(1, 4, 2, 16),
        "positions": positions,
        **dict(zip([*names, "recent_keys", "recent_values"], cache.arguments(), strict=True)),
        "scaling": 0.25,
        "sliding_window": 0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        quantspec_attention(**arguments)
