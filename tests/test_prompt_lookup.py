import torch
from hypothesis import given
from hypothesis import strategies as st

from nestq.speculative.prompt_lookup import LEAST, MOST, agreement, look_up


def by_hand(row: list[int], count: int) -> list[int] | None:
    """What may follow a text, by trying every place in it."""
    best, longest = None, LEAST - 1
    for place in range(len(row) - 1):
        length = 0
        while length < min(MOST, place + 1) and row[place - length] == row[-1 - length]:
            length += 1
        if length > longest or (best is not None and length == longest):
            best, longest = place, length
    if best is None:
        return None
    text = list(row)
    for i in range(count):
        text.append(text[best + 1 + i])
    return text[len(row) :]


@given(data=st.data(), count=st.integers(1, 8), spare=st.integers(0, 12))
def test_what_followed_the_last_tokens_before(data: st.DataObject, count: int, spare: int) -> None:
    rows = data.draw(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)
    )
    pads = [data.draw(st.integers(0, 3)) for _ in rows]
    width = max(len(row) + pad for row, pad in zip(rows, pads, strict=True)) + spare
    # Padding and what is behind the end are like the text, and are not to be looked at.
    ids = torch.tensor([data.draw(st.integers(0, 2))]).expand(len(rows), width).clone()
    for row, (tokens, pad) in enumerate(zip(rows, pads, strict=True)):
        ids[row, pad : pad + len(tokens)] = torch.tensor(tokens)
    last = torch.tensor([[pad + len(row) - 1] for row, pad in zip(rows, pads, strict=True)])
    proposals, found = look_up(ids, last, torch.tensor(pads)[:, None], count)
    assert proposals.shape == (len(rows), count)
    assert ((proposals >= 0) & (proposals <= 2)).all()
    for row, tokens in enumerate(rows):
        expected = by_hand(tokens, count)
        assert bool(found[row]) == (expected is not None)
        if expected is not None:
            assert proposals[row].tolist() == expected


def test_the_longest_and_the_latest_place() -> None:
    text = [7, 1, 2, 3, 4, 9, 2, 3, 5, 6, 2, 3, 8, 1, 2, 3]
    pads = torch.zeros(1, 1, dtype=torch.int64)

    def following(tokens: list[int]) -> list[int]:
        ids = torch.tensor([tokens])
        return look_up(ids, torch.tensor([[len(tokens) - 1]]), pads, 3)[0][0].tolist()

    assert following(text) == [4, 9, 2]
    assert following([*text[1:-3], 0, 2, 3]) == [8, 0, 2]
    assert following([5, 6, 5, 6]) == [5, 6, 5]  # the text repeats itself


def test_a_round_needs_no_number_on_the_host() -> None:
    ids = torch.zeros(2, 12, dtype=torch.int64, device="meta")
    last = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    proposals, found = look_up(ids, last, last, 4)
    assert (proposals.shape, found.shape) == ((2, 4), (2, 1))


def test_agreement() -> None:
    proposals = torch.tensor([4, 5, 6])
    for tokens, expected in (
        ([4, 5, 6, 7], (3, 3)),
        ([4, 5, 6], (3, 3)),
        ([4, 5, 9], (2, 3)),
        ([4, 5], (2, 2)),  # nothing is known of the third
        ([9, 5, 6], (0, 1)),
        ([9], (0, 1)),
        ([4, 9, 6, 7, 8], (1, 2)),
    ):
        assert agreement(proposals, torch.tensor(tokens)) == expected
