"""The reference attention over 16-bit keys and values: near plain attention, and the same bits."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nestq.reference.dense_kv import append_16, attention_16


class Call(NamedTuple):
    """Arguments of an attention."""

    query: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    window: int
    sink: int = 0
    local: int = 0


def random_call(
    heads: tuple[int, int] = (4, 2), window: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Call:
    """Two rows of five queries over 1100 slots; the second row begins with pads."""
    torch.manual_seed(0)
    positions = torch.stack((torch.arange(1095, 1100), torch.arange(-2, 3)))
    keys, values = (torch.randn(2, heads[1], 1100, 16).to(dtype) for _ in "kv")
    query = torch.randn(2, heads[0], 5, 16).to(dtype)
    return Call(query, positions, keys, values, 0.25, window)


def plain(call: Call) -> Tensor:
    """Softmax attention in float64."""
    group = call.query.shape[1] // call.keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (call.keys, call.values))
    distance = call.positions[:, None, :, None] - torch.arange(keys.shape[2])
    visible = distance >= 0
    if call.window:
        visible &= distance < call.window
    if call.local:
        visible &= (distance < call.local) | (torch.arange(keys.shape[2]) < call.sink)
    scores = call.query.double() @ keys.mT * call.scaling
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num() @ values


def budget(call: Call) -> float:
    """Largest error that rounding to fixed point allows.

    A query is off by at most 2^-23 of its largest element, keys and values by 2^-21 of theirs, and
    each weight twice by 2^-22 of the largest.
    """
    query, keys, values = (float(x.abs().max()) for x in (call.query, call.keys, call.values))
    slots, head_dim = call.keys.shape[2:]
    score = head_dim * call.scaling * query * keys * (2**-23 + 2**-21)
    # A score's error changes a weight, and through the sum of weights all others.
    return values * (4 * score + 2 * slots * 2**-22 + 2**-21)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (2, 1)])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("sink", "local"), [(0, 0), (4, 900), (2, 3)])
def test_it_is_softmax_attention(
    heads: tuple[int, int], window: int, sink: int, local: int
) -> None:
    call = random_call(heads, window, torch.float32)._replace(sink=sink, local=local)
    out = attention_16(*call)
    assert ((out.double() - plain(call)).abs() <= budget(call)).all()
    assert (out[1, :, :2] == 0).all()  # pads
    assert out.transpose(1, 2).is_contiguous()


def test_the_query_is_rounded_to_the_dtype_of_the_keys() -> None:
    call = random_call()
    exact = call.query + torch.randn(call.query.shape) * 1e-4
    rounded = exact.bfloat16().float()
    assert torch.equal(attention_16(exact, *call[1:]), attention_16(rounded, *call[1:]))


@pytest.mark.parametrize("local", [0, 600])
def test_bits_of_a_row_depend_on_nothing_else(local: int) -> None:
    call = random_call()._replace(sink=4, local=local)
    out = attention_16(*call)
    for row in range(2):
        for column in range(5):
            last = int(call.positions[row, column])
            alone = attention_16(
                call.query[row : row + 1, :, column : column + 1],
                call.positions[row : row + 1, column : column + 1],
                call.keys[row : row + 1, :, : max(last, 0) + 1],
                call.values[row : row + 1, :, : max(last, 0) + 1],
                *call[4:],
            )
            assert torch.equal(alone[0, :, 0], out[row, :, column])


def test_what_lies_behind_a_position_is_not_read() -> None:
    call = random_call()
    expected = attention_16(*call)[1]
    call.keys[1, :, 3:] = torch.nan
    call.values[1, :, 3:] = torch.nan
    assert torch.equal(attention_16(*(x[1:] for x in call[:4]), *call[4:])[0], expected)


def test_pads_are_not_written() -> None:
    states = torch.randn(2, 2, 2, 3, 8)
    caches = torch.zeros(2, 2, 2, 6, 8).bfloat16()
    append_16(*states, torch.tensor([[-1, 4, 5], [-2, -1, -3]]), *caches)
    for cache, new in zip(caches, states.bfloat16(), strict=True):
        assert torch.equal(cache[0, :, 4:], new[0, :, 1:])
        assert (cache[0, :, :4] == 0).all()
        assert (cache[1] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 2, 16)}, "H a multiple of H_kv"),
        ({"values": torch.zeros(1, 2, 8, 16)}, "keys and values must both be"),
        ({"positions": torch.tensor([[0, 9]])}, "below the cache's capacity 9, got 9"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "query": torch.zeros(1, 4, 2, 16),
        "positions": torch.tensor([[0, 1]]),
        "keys": torch.zeros(1, 2, 9, 16),
        "values": torch.zeros(1, 2, 9, 16),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        attention_16(**arguments, scaling=0.25, sliding_window=0)
