import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nested_kv import Planes, planes, poisoned, random
from torch import Tensor

from nestq.reference.attention import KEY_BLOCK, QUERY_STEPS, WEIGHT_STEPS, nested_attention
from nestq.reference.kv import dequantize_kv


def visible_slots(
    position: int, slots: int, window: int, sink: int = 0, local: int = 0
) -> list[int]:
    first = max(0, position - window + 1) if window else 0
    seen = range(first, min(position + 1, slots))
    return [slot for slot in seen if not local or slot < sink or slot > position - local]


def plain_attention(
    query: Tensor,
    positions: Tensor,
    keys: Planes,
    values: Planes,
    scaling: float,
    window: int = 0,
    recent: int | None = 0,
    sparse: tuple[int, int] = (0, 0),
) -> Tensor:
    """Softmax attention in float64, a row at a time; ``recent=None`` reads the base only."""
    batch, heads, count, _ = query.shape
    group = heads // keys.base.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(batch):
        for i in range(count):
            position = int(positions[b, i])
            slots = visible_slots(position, keys.base.shape[2], window, *sparse)
            if not slots:
                continue
            old = sum(slot <= position - recent for slot in slots) if recent else 0
            if recent is None:
                old = len(slots)
            for h in range(heads):
                k, v = (
                    torch.cat(
                        (
                            dequantize_kv(base[:old], None, scale[:old], torch.float64),
                            dequantize_kv(base[old:], fine[old:], scale[old:], torch.float64),
                        )
                    )
                    for base, fine, scale in (
                        (plane[b, h // group, slots] for plane in entries)
                        for entries in (keys, values)
                    )
                )
                weights = (k @ query[b, h, i].double() * scaling).softmax(-1)
                out[b, h, i] = weights @ v
    return out


def error_budget(query: Tensor, keys: Planes, values: Planes, scaling: float) -> float:
    """How far the fixed-point attention of float64 queries may be from exact arithmetic.

    A query's element is off by up to max|q| / (2 QUERY_STEPS), which moves a score by up to delta,
    and a weight, relative to the others, by a factor of up to exp(2 delta). A weight code is off
    by half a step, in the numerator and in the denominator, which is at least one whole weight.
    No value is above 8 s. Rounding in float64 comes on top.
    """
    head_dim = query.shape[-1]
    largest_score = head_dim * query.abs().max().item() * 8 * keys.scale.max().item() * scaling
    delta = largest_score * (0.5 / QUERY_STEPS + 8 * 2**-53)
    weights = 2 * keys.base.shape[2] * 0.5 / WEIGHT_STEPS
    return 8 * values.scale.max().item() * (4 * delta + weights + 2**-48)


def attend(
    query: Tensor,
    positions: Tensor,
    keys: Planes,
    values: Planes,
    window: int = 0,
    recent: int | None = 0,
    sparse: tuple[int, int] = (0, 0),
) -> Tensor:
    """The function under test with the usual scaling; ``recent=None`` reads the base only."""
    reads = (*keys, *values) if recent is not None else (*keys.draft(), *values.draft())
    options = query.shape[-1] ** -0.5, window, recent or 0, *sparse
    return nested_attention(query, positions, *reads, *options)


SHAPES = [  # heads, KV heads, head size
    (4, 2, 16),
    (3, 1, 64),
    (2, 2, 80),
    (4, 1, 96),
    (2, 1, 128),
    (1, 1, 256),
]


@pytest.mark.parametrize("read", ["kv8", "kv4", "recent"])
@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_plain_attention_over_the_dequantized_cache(
    shape: tuple[int, int, int], window: int, read: str
) -> None:
    heads, kv_heads, head_dim = shape
    keys, values = planes(2, kv_heads, 30, head_dim), planes(2, kv_heads, 30, head_dim, seed=5)
    query = random(2, heads, 5, head_dim, seed=7).double()
    positions = torch.tensor([[25, 26, 27, 28, 29], [-1, -1, 0, 1, 2]])
    scaling = head_dim**-0.5
    recent = {"kv8": 0, "kv4": None, "recent": 4}[read]

    out = attend(query, positions, keys, values, window, recent)
    expected = plain_attention(query, positions, keys, values, scaling, window, recent)

    assert (out - expected).abs().max() <= error_budget(query, keys, values, scaling)
    # The budget is far below what reading another plane, or one slot more or less, would change.
    assert error_budget(query, keys, values, scaling) < 1e-5


@pytest.mark.parametrize("read", ["kv8", "kv4", "recent"])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("sparse", [(0, 1), (3, 6), (27, 2), (0, 40)])
def test_a_sparse_draft_sees_the_sink_and_the_last_slots(
    sparse: tuple[int, int], window: int, read: str
) -> None:
    keys, values = planes(2, 2, 30, 16), planes(2, 2, 30, 16, seed=5)
    query = random(2, 4, 5, 16, seed=7).double()
    positions = torch.tensor([[25, 26, 27, 28, 29], [-1, -1, 0, 1, 2]])
    recent = {"kv8": 0, "kv4": None, "recent": 4}[read]

    out = attend(query, positions, keys, values, window, recent, sparse)
    expected = plain_attention(query, positions, keys, values, 0.25, window, recent, sparse)

    assert (out - expected).abs().max() <= error_budget(query, keys, values, 0.25)


def test_sums_over_more_than_one_block_of_keys() -> None:
    slots = 2 * KEY_BLOCK + 100
    keys, values = planes(1, 1, slots, 16), planes(1, 1, slots, 16, seed=5)
    query = random(1, 2, 2, 16, seed=7).double() / 4  # flat: every block counts
    positions = torch.tensor([[slots - 1, KEY_BLOCK + 1]])

    out = nested_attention(query, positions, *keys, *values, 0.25, 0, 0)
    expected = plain_attention(query, positions, keys, values, 0.25)

    assert (out - expected).abs().max() <= error_budget(query, keys, values, 0.25)


@st.composite
def calls(draw: st.DrawFn) -> dict:
    """A call whose keys end at S, with n queries a row, some of them pads."""
    slots = draw(st.sampled_from([1, 127, 129, KEY_BLOCK + 3]))
    heads, kv_heads, head_dim = draw(st.sampled_from(SHAPES))
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**31))
    ends = [draw(st.integers(0, slots)) for _ in range(batch)]
    ends[0] = slots
    positions = torch.tensor([[max(-1, end - count + i) for i in range(count)] for end in ends])
    keys = planes(batch, kv_heads, slots, head_dim, seed=seed)
    values = planes(batch, kv_heads, slots, head_dim, seed=seed + 2)
    recent = draw(st.sampled_from([None, 0, 5]))
    # float64 shows every bit of the arithmetic; the others round most of it away.
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return {
        "query": random(batch, heads, count, head_dim, seed=seed + 4).to(dtype),
        "positions": positions,
        "keys": keys,
        "values": values,
        "window": draw(st.sampled_from([0, 6])),
        "recent": recent,
        "sparse": draw(st.sampled_from([(0, 0), (2, 5)])),
    }


@settings(max_examples=40, deadline=None)
@given(calls())
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_a_larger_cache(call: dict) -> None:
    together = attend(**call)
    query, positions, keys, values = (
        call[name] for name in ("query", "positions", "keys", "values")
    )
    batch, kv_heads, _, half = keys.base.shape
    # Slots that no query sees hold anything at all.
    rest = poisoned(batch, kv_heads, 200, 2 * half)
    keys, values = (
        Planes(*(torch.cat(pair, 2) for pair in zip(entries, rest, strict=True)))
        for entries in (keys, values)
    )
    for b in range(batch):
        row = slice(b, b + 1)
        for i in range(query.shape[2]):
            alone = attend(
                query[row, :, i : i + 1],
                positions[row, i : i + 1],
                keys.rows(row),
                values.rows(row),
                call["window"],
                call["recent"],
                call["sparse"],
            )
            assert torch.equal(alone[0, :, 0], together[b, :, i])


@given(calls())
@settings(max_examples=20, deadline=None)
def test_the_order_of_queries_does_not_matter(call: dict) -> None:
    order = torch.randperm(call["query"].shape[2], generator=torch.Generator().manual_seed(0))
    shuffled = {
        **call,
        "query": call["query"][:, :, order],
        "positions": call["positions"][:, order],
    }

    assert torch.equal(attend(**shuffled), attend(**call)[:, :, order])


def test_pieces_of_a_long_prompt_have_the_bits_of_the_whole(monkeypatch) -> None:
    keys, values = planes(2, 2, 50, 16), planes(2, 2, 50, 16, seed=5)
    query, positions = random(2, 4, 50, 16, seed=7), torch.arange(50).repeat(2, 1)
    whole = attend(query, positions, keys, values)
    monkeypatch.setattr("nestq.reference.attention.SCORES_A_PIECE", 2 * 2 * 50 * 7)

    assert torch.equal(attend(query, positions, keys, values), whole)


def test_pads_give_zeros_and_change_nothing() -> None:
    keys, values = planes(1, 2, 9, 16), planes(1, 2, 9, 16, seed=5)
    query = random(1, 4, 3, 16)
    query[:, :, 0] = torch.nan
    out = attend(query, torch.tensor([[-3, -1, 8]]), keys, values)

    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert torch.equal(
        out[:, :, 2], attend(query[:, :, 2:], torch.tensor([[8]]), keys, values)[:, :, 0]
    )


def test_the_draft_cannot_see_the_refinement() -> None:
    keys, values = planes(1, 2, 9, 16), planes(1, 2, 9, 16, seed=5)
    query, positions = random(1, 4, 3, 16), torch.tensor([[6, 7, 8]])
    # With a Recent-N policy, only the refinement of the recent slots is seen.
    before = attend(query, positions, keys, values, 0, 2)
    for entries in (keys, values):
        entries.refinement[:, :, :5] ^= 0xFF
    assert torch.equal(attend(query, positions, keys, values, 0, 2), before)
    assert not torch.equal(attend(query, positions, keys, values), before)


def test_recent_entries_without_older_ones_are_the_whole_refinement() -> None:
    keys, values = planes(1, 2, 9, 16), planes(1, 2, 9, 16, seed=5)
    query, positions = random(1, 4, 3, 16), torch.tensor([[6, 7, 8]])

    assert torch.equal(
        attend(query, positions, keys, values, 0, 9), attend(query, positions, keys, values)
    )


def test_zero_vectors_and_zero_queries_are_safe() -> None:
    empty = Planes(*(torch.zeros_like(plane) for plane in planes(1, 1, 4, 16)))
    values = planes(1, 1, 4, 16)
    query, positions = torch.zeros(1, 1, 1, 16), torch.tensor([[3]])
    average = dequantize_kv(*values, torch.float64).mean(2, keepdim=True)

    assert torch.equal(attend(query, positions, empty, empty), query)
    for q, keys in ((query, values), (random(1, 1, 1, 16), empty)):
        out = attend(q.double(), positions, keys, values)
        torch.testing.assert_close(out, average, rtol=0, atol=error_budget(q, keys, values, 0.25))


def test_nan_in_a_visible_slot_or_query_shows() -> None:
    keys, values = planes(1, 1, 4, 16), planes(1, 1, 4, 16, seed=5)
    query, positions = random(1, 1, 2, 16), torch.tensor([[1, 3]])
    keys.scale[0, 0, 2] = torch.nan
    out = attend(query, positions, keys, values)
    assert not out[0, 0, 0].isnan().any()
    assert out[0, 0, 1].isnan().all()

    query[0, 0, 0, 3] = torch.nan
    assert attend(query, positions, keys, values).isnan().all()


@pytest.mark.parametrize("shape", [(1, 4, 0, 16), (0, 4, 3, 16)])
def test_no_queries_give_no_rows(shape: tuple[int, ...]) -> None:
    entries = planes(shape[0], 2, 9, 16)
    positions = torch.zeros(shape[0], shape[2], dtype=torch.int64)

    assert attend(torch.zeros(shape), positions, entries, entries).shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": random(1, 3, 2, 16)}, "H a multiple of H_kv"),
        ({"query": random(1, 4, 2, 18)}, "query must be"),
        ({"positions": torch.tensor([[0, 9]])}, "below the cache's capacity 9, got 9"),
        ({"positions": torch.tensor([[0]])}, "positions must be int64 of shape"),
        ({"key_scale": torch.zeros(1, 2, 8)}, "key scale must be"),
        ({"value_base": torch.zeros(1, 2, 9, 8)}, "value base must be"),
        ({"value_refinement": None}, "must both be given or both be None"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    entries = planes(1, 2, 9, 16)
    arguments = {
        "query": random(1, 4, 2, 16),
        "positions": torch.tensor([[0, 1]]),
        **{f"key_{name}": plane for name, plane in entries._asdict().items()},
        **{f"value_{name}": plane for name, plane in entries._asdict().items()},
        "scaling": 0.25,
        "sliding_window": 0,
        "recent": 0,
        **change,
    }

    with pytest.raises(ValueError, match=message):
        nested_attention(**arguments)


def test_a_head_too_large_to_be_exact_is_refused() -> None:
    entries = planes(1, 1, 1, 514)

    with pytest.raises(ValueError, match="head size up to 512, got 514"):
        attend(random(1, 1, 1, 514), torch.tensor([[0]]), entries, entries)
