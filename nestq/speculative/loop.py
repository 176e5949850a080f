"""Rounds until every row of a batch is finished, as the host sees them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from nestq.speculative.selection import UNDEFINED
from nestq.speculative.state import DecodingState, Reports
from nestq.speculative.stopping import Stopping


class Transcript:
    """What the host knows of the sequences.

    Args:
        tokens: int64 ``[B, n]`` on the CPU, the prompts.
        pads: int64 ``[B]`` on the CPU, padding columns of each row.
        columns: that a sequence may have.
        pad_token: what fills the columns behind a sequence.

    Attributes:
        ids: int64 ``[B, columns]`` on the CPU.
        last: int64 ``[B]``, column of the last known token of each row.
        finished: bool ``[B]``.
        pads: as given.
    """

    def __init__(self, tokens: Tensor, pads: Tensor, columns: int, pad_token: int) -> None:
        batch, width = tokens.shape
        # By name, since a user may have another default device.
        self.ids = torch.full((batch, columns), pad_token, device="cpu")
        self.ids[:, :width] = tokens
        self.last = torch.full((batch,), width - 1, device="cpu")
        self.finished = torch.zeros(batch, dtype=torch.bool, device="cpu")
        self.pads = pads
        self._pad_token = pad_token

    def longest(self) -> int:
        """Cached positions of the longest row."""
        return int((self.last - self.pads).max())

    def add(self, report: Tensor) -> None:
        """Add the tokens that a round reported (``DecodingState.report``).

        A row that the host has ended meanwhile gets none.
        """
        kept = report[:, 0].masked_fill(self.finished, 0)
        for row, count in enumerate(kept.tolist()):
            start = int(self.last[row]) + 1
            self.ids[row, start : start + count] = report[row, 2 : 2 + count]
        self.last += kept
        self.finished = self.finished | report[:, 1].bool()

    def end_row(self, row: int, column: int) -> None:
        """End a row at a column that it has reached, and forget what is behind it."""
        self.ids[row, column + 1 :] = self._pad_token
        self.last[row] = column
        self.finished[row] = True

    def refuse_undefined(self) -> None:
        """Raise ValueError if the last token of a row could not be chosen."""
        tokens = self.ids.gather(1, self.last[:, None])[:, 0]
        rows = (tokens == UNDEFINED).nonzero().flatten().tolist()
        if rows:
            raise ValueError(
                "no token can be chosen: the scores of the model, after logits processors, hold "
                f"NaN or +inf or leave no token in row(s) {', '.join(map(str, rows))}; look for "
                "NaN in the model's weights, and at the processors"
            )

    def sequences(self, hidden: int = 0) -> Tensor:
        """int64 ``[B, columns]`` up to the end of the longest row, without hidden columns."""
        return self.ids[:, hidden : int(self.last.max()) + 1]


class ColumnStream:
    """Gives a streamer new tokens as transformers does: one column of the batch at a time.

    A column is sent when every row has it; a finished row has padding.
    """

    def __init__(self, streamer: BaseStreamer | None, width: int) -> None:
        self.streamer = streamer
        self.sent = width

    def send(self, transcript: Transcript) -> None:
        """Send the columns that have become complete."""
        if self.streamer is None:
            return
        known = transcript.last + 1
        unfinished = known[~transcript.finished]
        ready = int(unfinished.min() if len(unfinished) else known.max())
        for column in transcript.ids[:, self.sent : ready].T:
            self.streamer.put(column)
        self.sent = max(self.sent, ready)


def complete(
    run: Callable[[int], None],
    state: DecodingState,
    transcript: Transcript,
    stopping: Stopping,
    stream: ColumnStream,
    ahead: int,
    observe: Callable[[Tensor], None] | None = None,
    on_host: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run rounds until every row is finished.

    Args:
        run: one round, given the number of cached positions of the longest row.
        state: what the round works on.
        transcript: gets the new tokens.
        stopping: has the criteria that only the host can apply.
        stream: gets complete columns.
        ahead: rounds that may be in flight while the host looks at the one before them. A round of
            finished rows changes nothing.
        observe: gets each report before the transcript does.
        on_host: a context for the host's work on a report.

    Returns:
        Rounds until the last row was finished.

    Raises:
        ValueError: a token could not be chosen.
    """
    reports = Reports(state.report)
    rounds = 0
    while not transcript.finished.all():
        # A round keeps a token at least: rows may be sure to end in the rounds that are in flight.
        room = (stopping.max_length - 1 - transcript.last)[~transcript.finished]
        if int(room.max()) > len(reports):
            run(transcript.longest())
            reports.send()
            if len(reports) <= ahead:
                continue
        report = reports.receive()
        with on_host():
            if observe is not None:
                observe(report)
            take(report, state, transcript, stopping, stream)
        rounds += 1
    return rounds


def take(
    report: Tensor,
    state: DecodingState,
    transcript: Transcript,
    stopping: Stopping,
    stream: ColumnStream,
) -> None:
    """Take up the tokens of a report: end rows that they end, and stream them.

    Raises:
        ValueError: a token could not be chosen.
    """
    first = (transcript.last + 1).tolist()
    transcript.add(report)
    if stopping.others:
        _apply_others(state, transcript, stopping, first)
    transcript.refuse_undefined()
    stream.send(transcript)


def _apply_others(
    state: DecodingState, transcript: Transcript, stopping: Stopping, first: list[int]
) -> None:
    """End the rows that another criterion ends inside the block that begins at ``first``."""
    for row, (start, last) in enumerate(zip(first, transcript.last.tolist(), strict=True)):
        if last < start:
            continue
        ids = transcript.ids if stopping.on_host else state.ids
        # The host's ids may have an undefined token, which is an id to no criterion.
        known = ids[row : row + 1, : last + 1].clamp(min=0)
        column = stopping.first_end(known, start, last)
        if column is not None:
            state.end_row(row, column)
            transcript.end_row(row, column)
