import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nested_kv import Planes, assert_same_bytes, planes, poisoned, random
from torch import Tensor

from nestq.reference.kv import dequantize_kv, kv_append, quantize_kv
from nestq.reference.weights import unpack_base, unpack_refinement

HEAD_DIMS = [2, 16, 24, 64, 80, 96, 128, 256]


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Keys or values ``[B, H_kv, n, D]``: of any size, equal or not, some of them zero."""
    shape = (*(draw(st.integers(1, 3)) for _ in range(3)), draw(st.sampled_from(HEAD_DIMS)))
    x = random(*shape, seed=draw(st.integers(0, 2**31)))
    x *= draw(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]))
    if draw(st.booleans()):
        x[..., :] = x[..., :1].clone()
    if draw(st.booleans()):
        x[0] = 0
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@given(vectors())
def test_codes_are_the_papers(x: Tensor) -> None:
    base, refinement, scale = quantize_kv(x)
    head_dim = x.shape[-1]
    x = x.float()
    s = x.abs().amax(-1, keepdim=True) / 7
    # A zero vector has no scale to divide by, and zero codes.
    divisor = torch.where(s > 0, s, torch.inf)
    q4 = torch.clip(torch.round(x / divisor), -8, 7)
    q_r = torch.clip(torch.round((x - q4 * s) / (divisor / 16)), -8, 7)

    assert torch.equal(scale, s.squeeze(-1))
    assert torch.equal(unpack_base(base, head_dim).float(), q4)
    assert torch.equal(unpack_refinement(refinement, head_dim).float(), q_r)


@given(vectors())
def test_composed_code_minus_16_base_codes_is_the_refinement(x: Tensor) -> None:
    base, refinement, scale = quantize_kv(x)
    draft = dequantize_kv(base, None, scale, torch.float64)
    target = dequantize_kv(base, refinement, scale, torch.float64)
    q_r = unpack_refinement(refinement, x.shape[-1]).double()

    # Products of a code and a float32 scale are exact in float64, and so are their differences.
    assert torch.equal((target - draft) * 16, q_r * scale.double().unsqueeze(-1))


@given(vectors())
def test_reads_are_as_near_as_their_steps(x: Tensor) -> None:
    base, refinement, scale = quantize_kv(x)
    step = scale.double().unsqueeze(-1)
    # float32 rounds x / s and q4 s by at most 2^-24 of 8 s each: 2^-20 s, so 2^-16 of s / 16.
    rounding = 1 + 2**-16
    draft = dequantize_kv(base, None, scale, torch.float64)
    target = dequantize_kv(base, refinement, scale, torch.float64)

    assert ((x.double() - draft).abs() <= step / 2 * rounding).all()
    # Half a refinement step; a whole one where a residual of s / 2 needs the code 8.
    assert ((x.double() - target).abs() <= step / 16 * rounding).all()


@given(vectors(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_a_dense_read_has_its_dtype_and_shape(x: Tensor, dtype: torch.dtype) -> None:
    base, refinement, scale = quantize_kv(x)
    dense = dequantize_kv(base, refinement, scale, dtype)
    exact = dequantize_kv(base, refinement, scale, torch.float64)

    assert dense.dtype == dtype
    assert dense.shape == x.shape
    torch.testing.assert_close(dense.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_nan_shows_in_its_own_vector_only() -> None:
    x = random(1, 2, 3, 16)
    x[0, 1, 2, 5] = torch.nan
    dense = dequantize_kv(*quantize_kv(x), torch.float32)

    assert dense[0, 1, 2].isnan().all()
    assert not dense[0, 0].isnan().any()
    assert not dense[0, 1, :2].isnan().any()


def written_one_by_one(states: Tensor, positions: Tensor, into: Planes) -> Planes:
    """The oracle of `kv_append`: a loop over entries that skips pads."""
    out = Planes(*(plane.clone() for plane in into))
    for b, row in enumerate(positions.tolist()):
        for i, slot in enumerate(row):
            if slot < 0:
                continue
            for plane, new in zip(out, quantize_kv(states[b, :, i]), strict=True):
                plane[b, :, slot] = new
    return out


@st.composite
def writes(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """States, positions with pads anywhere, and the capacity of a cache."""
    capacity = draw(st.integers(1, 12))
    batch, count = draw(st.integers(1, 3)), draw(st.integers(0, capacity))
    rows = [draw(st.permutations(range(capacity)))[:count] for _ in range(batch)]
    pads = draw(st.lists(st.booleans(), min_size=batch * count, max_size=batch * count))
    positions = torch.tensor(rows, dtype=torch.int64).reshape(batch, count)
    positions[torch.tensor(pads, dtype=torch.bool).reshape(batch, count)] = -1
    heads, head_dim = draw(st.integers(1, 2)), draw(st.sampled_from([2, 16, 24]))
    return random(batch, heads, count, head_dim), positions, capacity


@given(writes())
def test_append_writes_each_entry_at_its_position_and_no_pad(
    write: tuple[Tensor, Tensor, int],
) -> None:
    states, positions, capacity = write
    batch, heads, _, head_dim = states.shape
    cache = poisoned(batch, heads, capacity, head_dim)
    expected = written_one_by_one(states, positions, cache)

    kv_append(states, positions, *cache)

    assert_same_bytes(cache, expected)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 9), st.sampled_from([16, 80, 128]))
def test_rewriting_positions_is_writing_them_once(count: int, kept: int, head_dim: int) -> None:
    """A round: drafts write first, the target rewrites, the next round starts after ``kept``."""
    states = random(2, 3, 20, head_dim)
    positions = torch.arange(20).repeat(2, 1)
    once, twice = planes(2, 3, 20, head_dim, seed=3), planes(2, 3, 20, head_dim, seed=3)
    kv_append(states, positions, *once)

    drafts = random(2, 3, 20, head_dim, seed=9)
    for step in range(count):
        span = slice(step, step + 1)
        kv_append(drafts[:, :, span], positions[:, span], *twice)
    for span in (slice(0, count), slice(min(kept, count), 20)):
        kv_append(states[:, :, span], positions[:, span], *twice)

    assert_same_bytes(twice, once)


def test_a_strided_state_is_written_like_a_contiguous_one() -> None:
    states = random(2, 5, 3, 16).transpose(1, 2)
    positions = torch.arange(5).repeat(2, 1)
    one, other = poisoned(2, 3, 5, 16), poisoned(2, 3, 5, 16)

    kv_append(states, positions, *one)
    kv_append(states.contiguous(), positions, *other)

    assert_same_bytes(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": random(2, 3, 4, 18)}, "states must be"),
        ({"states": random(1, 3, 4, 16)}, "states must be"),
        ({"positions": torch.arange(4)}, "positions must be int64 of shape"),
        ({"positions": torch.arange(4, dtype=torch.int32).repeat(2, 1)}, "positions must be int64"),
        ({"positions": torch.arange(5, 9).repeat(2, 1)}, "below the cache's capacity 8, got 8"),
        ({"base": torch.zeros(2, 3, 8, 8)}, "base must be uint8"),
        ({"refinement": torch.zeros(2, 3, 8, 4, dtype=torch.uint8)}, "refinement must be"),
        ({"scale": torch.zeros(2, 3, 8, dtype=torch.bfloat16)}, "scale must be"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    change: dict[str, Tensor], message: str
) -> None:
    cache = poisoned(2, 3, 8, 16)
    before = Planes(*(plane.clone() for plane in cache))
    arguments = {
        "states": random(2, 3, 4, 16),
        "positions": torch.arange(4).repeat(2, 1),
        **cache._asdict(),
        **change,
    }

    with pytest.raises(ValueError, match=message):
        kv_append(**arguments)
    assert_same_bytes(cache, before)
