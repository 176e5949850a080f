"""A forward pass over QuantSpec's cache: exact arithmetic, and the same bytes however it is cut."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from nested_kv import random
from torch import Tensor

from nestq.reference import quantspec
from nestq.reference.attention_quantspec import (
    RECENT_FACTOR_STEPS,
    RECENT_STEPS,
    WEIGHT_STEPS,
    quantspec_attention,
)
from nestq.reference.kv_quantspec import GROUP, value_groups
from nestq.reference.quantspec import SLOTS, due_groups, longest_piece, quantspec_append

update = partial(quantspec.append_and_attend, quantspec_append, quantspec_attention)


class Cache(NamedTuple):
    """Buffers and planes, full of what nobody may read."""

    tensors: list[Tensor]
    """In the order of the operator."""

    @staticmethod
    def poisoned(batch: int, heads: int, groups: int, head_dim: int) -> "Cache":
        tensors = []
        codes = batch, heads, groups * GROUP, head_dim // 2
        for scales in ((groups, head_dim), (groups * GROUP, value_groups(head_dim))):
            tensors.append(torch.full((batch, heads, SLOTS, head_dim), torch.nan))
            tensors += [torch.full(codes, 0xA5, dtype=torch.uint8) for _ in range(2)]
            tensors += [torch.full((batch, heads, *scales), torch.nan) for _ in range(2)]
        return Cache(tensors)


class Tokens(NamedTuple):
    """Queries, keys and values of a sequence ``[1 or B, heads, T, D]``."""

    query: Tensor
    keys: Tensor
    values: Tensor

    @staticmethod
    def random(
        batch: int, heads: tuple[int, int], count: int, head_dim: int, seed: int = 0
    ) -> "Tokens":
        shapes = [(batch, h, count, head_dim) for h in (heads[0], heads[1], heads[1])]
        return Tokens(*(random(*shape, seed=seed + i) for i, shape in enumerate(shapes)))

    def step(
        self, cache: Cache, positions: Tensor, refinement: bool = True, window: int = 0
    ) -> Tensor:
        """The result of the tokens at positions ``[B, n]``; pads have numbers too."""
        states = [
            torch.stack([row[:, at.clamp(min=0)] for row, at in zip(x, positions, strict=True)])
            for x in self
        ]
        scaling = self.query.shape[-1] ** -0.5
        return update(*states, positions, *cache.tensors, refinement, scaling, window)


def on_a_grid(shape: tuple[int, ...], axis: int, size: int, seed: int) -> Tensor:
    """Numbers whose groups of ``size`` along an axis span exactly 15 steps of a power of two.

    So steps and zero points are numbers of few bits, and float32 rounds nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    fine = torch.randint(0, 15 * 64 + 1, shape, generator=generator).unflatten(axis, (-1, size))
    fine.select(axis + 1, 0).fill_(0)
    fine.select(axis + 1, 1).fill_(15 * 64)
    step_shape = list(fine.shape)
    step_shape[axis + 1] = 1
    step = 2.0 ** torch.randint(-7, -2, step_shape, generator=generator)
    lowest = torch.randint(-20, 5, step_shape, generator=generator) / 32
    return (lowest + fine / 64 * step).flatten(axis, axis + 1)


def hierarchical(x: Tensor, axis: int, both: bool) -> Tensor:
    """Groups along an axis quantized and read back in float64 as the paper's section 4.2 says."""
    lowest, highest = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale = (highest - lowest) / 15
    upper = ((x - lowest) / scale).round().clamp(0, 15)
    error = x - (upper * scale + lowest)
    lower = (error / (scale / 16)).round().clamp(-8, 7)
    return (upper + (lower / 16 if both else 0)) * scale + lowest


def paper(tokens: Tokens, position: int, both: bool, window: int) -> Tensor:
    """The result ``[H, D]`` of the query at a position, batch 1, from the definition."""
    query, keys, values = (x[0].double() for x in tokens)
    head_dim = query.shape[-1]
    # Group c is quantized from position (c + 2) G on.
    groups = [c for c in range(position // GROUP) if position >= (c + 2) * GROUP]
    old = len(groups) * GROUP
    channels = keys[:, :old].unflatten(1, (len(groups), GROUP))
    old_keys = hierarchical(channels, 2, both).flatten(1, 2)
    size = min(head_dim, GROUP)
    old_values = hierarchical(values[:, :old].unflatten(-1, (-1, size)), -1, both).flatten(-2)
    seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
    keys = torch.cat((old_keys, keys[:, old:]), 1)[:, seen]
    values = torch.cat((old_values, values[:, old:]), 1)[:, seen]
    repeats = query.shape[0] // keys.shape[0]
    keys, values = (x.repeat_interleave(repeats, 0) for x in (keys, values))
    scores = (keys @ query[:, position, :, None])[..., 0] * head_dim**-0.5
    return (scores.softmax(-1)[:, None] @ values)[:, 0]


def budget(tokens: Tokens) -> float:
    """How far fixed point may be from exact arithmetic; see ``test_attention_quantspec``."""
    query, keys, values = (x.abs().max().item() for x in tokens)
    head_dim = tokens.query.shape[-1]
    delta = query * keys * head_dim**0.5 * (1 / RECENT_FACTOR_STEPS + 1 / RECENT_STEPS)
    weights = 2 * tokens.keys.shape[2] / WEIGHT_STEPS
    weights += 2 * GROUP * (1 / RECENT_FACTOR_STEPS + 1 / RECENT_STEPS)
    return 2 * values * (4 * delta + weights + 2**-44)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "window"), [((4, 2), 16, 0), ((2, 1), 64, 300), ((1, 1), 256, 0)]
)
def test_every_query_is_the_papers(
    heads: tuple[int, int], head_dim: int, window: int, both: bool
) -> None:
    count = 3 * GROUP + 6
    shape = 1, heads[1], 4 * GROUP, head_dim
    keys = on_a_grid(shape, 2, GROUP, seed=1)[:, :, :count]
    values = on_a_grid(shape, 3, min(head_dim, GROUP), seed=2)[:, :, :count]
    tokens = Tokens(random(1, heads[0], count, head_dim).double(), keys, values)
    cache = Cache.poisoned(1, heads[1], 2, head_dim)
    split = 3 * GROUP - 3
    prompt = tokens.step(cache, torch.arange(split)[None], both, window)
    # Blocks as rounds have them, one of them across a multiple of G.
    blocks = [torch.arange(p, min(p + 5, count))[None] for p in range(split, count, 5)]
    out = torch.cat([prompt, *(tokens.step(cache, at, both, window) for at in blocks)], 2)

    allowed = budget(tokens)
    for position in (0, 1, 2 * GROUP - 1, 2 * GROUP, *range(split, count)):
        expected = paper(tokens, position, both, window)
        assert (out[0, :, position] - expected).abs().max() <= allowed, position
    # Far below what another precision would change.
    other = paper(tokens, count - 1, not both, window)
    assert (out[0, :, -1] - other).abs().max() > 10 * allowed


def pieces(total: int, size: int) -> list[Tensor]:
    return [torch.arange(start, min(start + size, total)) for start in range(0, total, size)]


@pytest.mark.parametrize("size", [1, 60, GROUP, 2 * GROUP, 300])
def test_a_prompt_in_pieces_is_the_prompt_in_one(size: int) -> None:
    """Results and all that the cache holds, bit for bit; rows begin with pads."""
    total = 3 * GROUP + 10
    pads = torch.tensor([[0], [100]])
    tokens = Tokens.random(2, (2, 1), total, 4)
    whole, cut = (Cache.poisoned(2, 1, 3, 4) for _ in range(2))
    expected = tokens.step(whole, torch.arange(total) - pads)
    columns = pieces(total, size)
    out = torch.cat([tokens.step(cut, one - pads) for one in columns], 2)
    assert torch.equal(out, expected)
    for ours, theirs in zip(cut.tensors, whole.tensors, strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def test_a_row_is_the_sequence_alone() -> None:
    pads = torch.tensor([[0], [3], [GROUP + 1], [3 * GROUP]])
    total = 3 * GROUP + 20
    tokens = Tokens.random(4, (2, 2), total, 4)
    together = Cache.poisoned(4, 2, 2, 4)
    out = tokens.step(together, torch.arange(total) - pads)
    for b, (pad,) in enumerate(pads.tolist()):
        alone = Cache.poisoned(1, 2, 2, 4)
        row = Tokens(*(x[b : b + 1] for x in tokens))
        own = row.step(alone, torch.arange(total - pad)[None])
        assert torch.equal(out[b : b + 1, :, pad:], own)
        assert not out[b, :, :pad].any()
        for ours, theirs in zip(together.tensors, alone.tensors, strict=True):
            assert torch.equal(ours[b : b + 1].nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("gamma", [2, 16])
def test_a_rejected_token_leaves_no_trace(gamma: int) -> None:
    """Draft tokens are poison, and so are the verified ones that are rejected."""
    start, total = 2 * GROUP - 20, 3 * GROUP + 3
    tokens = Tokens.random(1, (2, 1), total + gamma, 4)
    clean, rounds = (Cache.poisoned(1, 1, 3, 4) for _ in range(2))
    expected = tokens.step(clean, torch.arange(total)[None])
    tokens.step(rounds, torch.arange(start)[None])
    generator = torch.Generator().manual_seed(gamma)
    poison = Tokens(*(torch.full_like(x, torch.nan) for x in tokens))
    length = start
    while length < total:
        for i in range(gamma):
            poison.step(rounds, torch.tensor([[length + i]]), refinement=False)
        kept = int(torch.randint(1, gamma + 2, (), generator=generator))
        block = torch.arange(length, length + gamma + 1)
        mixed = Tokens(*(x.clone() for x in tokens))
        for x in mixed:
            x[:, :, length + kept :] = torch.nan
        out = mixed.step(rounds, block[None])
        end = min(length + kept, total)
        assert torch.equal(out[:, :, : end - length], expected[:, :, length:end])
        length += kept
    # Planes of all groups that were due, and what the next query reads in full precision.
    recent = torch.arange(total - 2 * GROUP, total) % SLOTS
    for i, (ours, theirs) in enumerate(zip(rounds.tensors, clean.tensors, strict=True)):
        if i in (0, 5):
            assert torch.equal(ours[:, :, recent], theirs[:, :, recent])
        else:
            assert not ours.double().isnan().all()
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def test_groups_are_due_at_multiples_of_their_size() -> None:
    positions = torch.tensor([[255, 256, 257], [382, 383, 384], [384, 385, 386], [385, 386, 387],
                              [-1, 0, 1], [-3, -2, -1]])  # fmt: skip
    assert due_groups(positions).tolist() == [[0], [1], [1], [-1], [-1], [-1]]
    long = due_groups(torch.arange(250, 250 + 270)[None])
    assert sorted(long[0].tolist()) == [0, 1, 2]
    assert longest_piece(SLOTS) == 2 * GROUP


REFUSALS: dict[str, tuple[dict[int, Callable[[Tensor], Any]], str]] = {
    "states": ({0: lambda x: x[..., :2]}, "keys must be"),
    "values": ({1: lambda x: x[:, :, :2]}, "values must be"),
    "gap": ({2: lambda x: x * 2}, "positions must be consecutive"),
    "pad behind": ({2: lambda x: x.masked_fill(x == 6, -1)}, "positions must be consecutive"),
    "capacity": ({2: lambda x: x + 2 * GROUP + GROUP - 4}, "below the cache's capacity 384"),
    "type": ({2: lambda x: x.int()}, "positions must be int64"),
    "small buffer": ({3: lambda x: x[:, :, : 2 * GROUP + 2]}, "R at least 259 for 3 tokens"),
    "planes": ({4: lambda x: x[:, :, 1:]}, "must have one shape"),
    "scale": ({6: lambda x: x.double()}, "key scale must be"),
    "buffers": ({8: lambda x: x.double()}, "recent_values must be torch.float32"),
    "value zero": ({12: lambda x: x[:, :, 1:]}, "value zero must be"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused(
    change: dict[int, Callable[[Tensor], Any]], message: str
) -> None:
    states = random(1, 2, 3, 4)
    arguments = [states, states, torch.tensor([[4, 5, 6]]), *Cache.poisoned(1, 2, 1, 4).tensors]
    for index, function in change.items():
        arguments[index] = function(arguments[index])
    with pytest.raises(ValueError, match=message):
        quantspec_append(*arguments)
