from typing import Any

import pytest
import small_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from speculative_runs import PAD, nested_model, padded_prompts, run
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from nestq.kv_cache import NestedKVCache
from nestq.speculative import speculative_generate
from nestq.speculative.loop import ColumnStream, Transcript, take
from nestq.speculative.state import DecodingState
from nestq.speculative.stopping import Stopping


class SumIsMultiple(StoppingCriteria):
    """Ends where the sum of all ids of a row is a multiple of 5."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.sum(1) % 5 == 0


@given(data=st.data(), batch=st.integers(1, 3), count=st.integers(1, 6), others=st.booleans())
def test_a_block_ends_where_transformers_ends_it(
    data: st.DataObject, batch: int, count: int, others: bool
) -> None:
    width = 4
    max_length = data.draw(st.integers(width + 3, width + 10))
    ends = data.draw(st.lists(st.integers(0, 9), max_size=2, unique=True))
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    if ends:
        criteria.append(EosTokenCriteria(ends))
    if others:
        criteria.append(SumIsMultiple())

    def ints(low: int, high: int, n: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    known = torch.tensor([ints(0, 9, width + 3) for _ in range(batch)])
    last = torch.tensor(ints(width - 1, width + 1, batch))[:, None]
    tokens = torch.tensor([ints(0, 9, count) for _ in range(batch)])
    offered = torch.tensor(ints(0, count, batch))
    ids = torch.zeros(batch, max_length + count + 1, dtype=torch.int64)
    ids[:, : width + 3] = known
    ids.scatter_(1, last + torch.arange(1, count + 1), tokens)

    stopping = Stopping(criteria)
    state = decoding_state(ids, last, stopping, gamma=count - 1)
    state.finished.copy_(offered == 0)
    state.keep(last, tokens, torch.arange(1, count) < offered[:, None])
    for row in range(batch):
        start = int(last[row]) + 1
        kept, ended = int(state.report[row, 0]), bool(state.finished[row])
        end = stopping.first_end(ids[row : row + 1], start, start + kept - 1)
        if end is not None:
            kept, ended = end - start + 1, True
        expected = 0, False
        while expected[0] < offered[row] and not expected[1]:
            length = start + expected[0] + 1
            expected = expected[0] + 1, bool(criteria(ids[row : row + 1, :length], None))
        if offered[row]:  # a finished row offers nothing and stays finished
            assert (kept, ended) == expected
        else:
            assert kept == 0
        assert (state.ids[row, start + int(state.report[row, 0]) :] == PAD).all()


def decoding_state(ids: Tensor, last: Tensor, stopping: Stopping, gamma: int) -> DecodingState:
    """A state whose rows have their last known token in the columns ``last``."""
    config = nested_model().config
    columns = stopping.max_length + gamma + 1
    cache = NestedKVCache(config, columns, len(ids))
    state = DecodingState(cache, columns, gamma, ends=4)
    state.begin(ids[:, :1], torch.zeros(len(ids), 1), stopping.max_length, PAD, stopping.eos)
    for row, column in enumerate(last[:, 0].tolist()):
        state.ids[row, : column + 1] = ids[row, : column + 1]
    cache.lengths.copy_(last[:, 0])
    return state


def test_a_maximum_length_is_needed() -> None:
    with pytest.raises(ValueError, match="MaxLengthCriteria"):
        Stopping(StoppingCriteriaList([EosTokenCriteria(1)]))
    lengths = StoppingCriteriaList([MaxLengthCriteria(7), MaxLengthCriteria(5)])
    assert Stopping(lengths).max_length == 5
    ends = [EosTokenCriteria([3, 4]), EosTokenCriteria(7)]
    assert Stopping(StoppingCriteriaList([*lengths, *ends])).eos == [3, 4, 7]


class EndsAt(StoppingCriteria):
    """Ends a row after a token, and keeps the ids that it was asked about."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        assert input_ids.shape[0] == 1
        assert scores is None
        self.seen.append(input_ids[0].tolist())
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_stopping_criterion_sees_every_token_once_and_in_order(gamma: int) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 4], 9)
    whole = run(model, tokens, gamma=0, attention_mask=mask).sequences
    criterion = EndsAt(int(whole[1, 9 + 10]))
    criteria = StoppingCriteriaList([criterion])
    output = run(model, tokens, gamma, attention_mask=mask, stopping_criteria=criteria).sequences
    for row, expected in zip(output.tolist(), whole.tolist(), strict=True):
        generated = expected[9:]
        end = criterion.token
        length = 9 + (generated.index(end) + 1 if end in generated else len(generated))
        assert row[:length] == expected[:length]
        assert set(row[length:]) <= {PAD}
        own = [ids for ids in criterion.seen if ids[:9] == expected[:9]]
        assert own == [expected[:n] for n in range(10, length + 1)]


def letters_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of letters and pairs of them, whose text is the tokens joined."""
    letters = [chr(ord("a") + i) for i in range(26)]
    pairs = [(first, second) for first in letters for second in letters][: 7 * (size - 26) : 7]
    vocabulary = [*letters, *("".join(pair) for pair in pairs)]
    backend = Tokenizer(BPE({text: i for i, text in enumerate(vocabulary)}, pairs))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_stop_strings_end_the_sequence_inside_and_across_blocks(gamma: int) -> None:
    model = nested_model()
    tokenizer = letters_tokenizer(97)
    tokens = small_models.tokens(model, 1, 9)
    whole = run(model, tokens, gamma=0).sequences[0].tolist()
    texts = [tokenizer.decode([token]) for token in whole]
    for i in range(9, len(whole) - 2):
        # The end of one token, a whole one, and the beginning of the next.
        stop = texts[i][-1] + texts[i + 1] + texts[i + 2][0]
        end = next(
            n for n in range(10, len(whole) + 1) if stop in "".join(texts[max(0, n - 4) : n])
        )
        output = run(model, tokens, gamma, stop_strings=["zzzz", stop], tokenizer=tokenizer)
        assert output.sequences[0].tolist() == whole[:end], (i, stop)


def test_stop_strings_of_the_generation_config_need_the_tokenizer() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 9)
    tokenizer = letters_tokenizer(97)
    whole = run(model, tokens, gamma=0).sequences
    stop = tokenizer.decode(whole[0, 11:13])
    model.generation_config.stop_strings = stop
    try:
        with pytest.raises(ValueError, match="tokenizer must be given with stop_strings"):
            speculative_generate(model, tokens, max_new_tokens=8)
        output = run(model, tokens, gamma=2, tokenizer=tokenizer)
        assert torch.equal(output.sequences, whole[:, :13])
    finally:
        model.generation_config.stop_strings = None


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_max_time_ends_all_rows(seconds: float) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 4], 9)
    output = run(model, tokens, gamma=3, attention_mask=mask, max_time=seconds)
    expected = run(model, tokens, gamma=0, attention_mask=mask).sequences
    new = 1 if seconds == 0 else expected.shape[1] - 9
    assert torch.equal(output.sequences, expected[:, : 9 + new])


@pytest.mark.parametrize("stop", ["c", "bc", "d"])
def test_stop_strings_and_max_time_are_looked_for_in_the_hosts_ids(stop: str) -> None:
    criteria = StoppingCriteriaList(
        [
            MaxLengthCriteria(9),
            StopStringCriteria(letters_tokenizer(26), stop),
            MaxTimeCriteria(1000.0),
        ]
    )
    stopping = Stopping(criteria)
    assert stopping.on_host
    tokens = torch.tensor([[7, 8], [8, 7]])
    ended: list[tuple[int, int]] = []
    state: Any = type("NoIds", (), {"end_row": lambda self, *at: ended.append(at)})()
    transcript = Transcript(tokens, torch.zeros(2, dtype=torch.int64), 9, PAD)
    # Four tokens for each row: tokens kept, whether the row is finished, the tokens.
    report = torch.tensor([[4, 0, 0, 1, 2, 0], [4, 0, 4, 4, 4, -2]])
    if stop != "d":  # the undefined token is not reached
        report[1, 5] = 4
        take(report, state, transcript, stopping, ColumnStream(None, 2))
        assert ended == [(0, 4)]
        assert transcript.finished.tolist() == [True, False]
        assert transcript.sequences().tolist()[0] == [7, 8, 0, 1, 2, PAD]
    else:
        with pytest.raises(ValueError, match=r"no token can be chosen.* row\(s\) 1"):
            take(report, state, transcript, stopping, ColumnStream(None, 2))
    # A round that was under way when the host ended a row gives it nothing.
    if ended:
        report = torch.tensor([[3, 1, 5, 5, 5, 0], [1, 0, 6, 0, 0, 0]])
        take(report, state, transcript, stopping, ColumnStream(None, 2))
        assert transcript.sequences().tolist() == [
            [7, 8, 0, 1, 2, PAD, PAD],
            [8, 7, 4, 4, 4, 4, 6],
        ]
        assert transcript.finished.tolist() == [True, False]


def test_criteria_of_the_user_are_given_ids_on_the_device() -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(9), MaxTimeCriteria(1.0), EndsAt(3)])
    assert not Stopping(criteria).on_host
