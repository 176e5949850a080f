"""Rounds of several kinds: each is chosen before it runs, and learnt from when its report comes."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nestq.speculative.adaptive import Chooser
from nestq.speculative.loop import Transcript
from nestq.speculative.metrics import Clock
from nestq.speculative.prompt_lookup import agreement, look_up
from nestq.speculative.round_kinds import RoundKind


class AdaptiveRounds:
    """Runs rounds of the kinds that a chooser chooses. The host waits for nothing.

    What looking up would have given is known in every round, from what was generated instead.

    Args:
        rounds: a round of each kind, given the number of cached positions of the longest row.
        chooser: of the kinds.
        transcript: what the host knows when a kind is chosen.
        clock: of the device.

    Attributes:
        lookups: rounds so far that verified tokens from the text.
    """

    def __init__(
        self,
        rounds: Mapping[RoundKind, Callable[[int], None]],
        chooser: Chooser,
        transcript: Transcript,
        clock: Clock,
    ) -> None:
        self.lookups = 0
        self._rounds = rounds
        self._chooser = chooser
        self._transcript = transcript
        self._clock = clock
        self._lookup = next((kind for kind in rounds if kind.lookup), None)
        # Kind, beginning and end of the rounds whose reports have not come yet.
        self._running: deque[tuple[RoundKind, Any, Any]] = deque()
        # What looking up gives behind the tokens that the host knows, and rows with a match.
        self._proposals = torch.empty(0)
        self._found = torch.zeros(len(transcript.ids), dtype=torch.bool)

    def __call__(self, length: int) -> None:
        """Choose a kind and run a round of it."""
        if self._lookup is not None:
            self._look_up(self._lookup.tokens)
        unfinished = int((~self._transcript.finished).sum())
        kind = self._chooser.choose(int(self._found.sum()) / max(unfinished, 1))
        start = self._clock.now()
        self._rounds[kind](length)
        self._running.append((kind, start, self._clock.now()))

    def observe(self, report: Tensor) -> None:
        """Learn from the oldest round that runs, which has ended.

        Args:
            report: of the round (``DecodingState.report``); the transcript does not have it yet.
        """
        kind, start, end = self._running.popleft()
        self.lookups += kind.lookup
        rows = (~self._transcript.finished).nonzero().flatten().tolist()
        kept, finished = report[:, 0].tolist(), report[:, 1].tolist()
        # The token behind the accepted ones judges another draft token, if there is one; but not
        # where the sequence ends.
        judged = [
            (kept[row] - 1, kept[row] - 1 if finished[row] else min(kept[row], kind.tokens))
            for row in rows
        ]
        tokens = sum(kept[row] for row in rows) / max(len(rows), 1)
        self._chooser.observe(kind, self._clock.between(start, end), judged, tokens)
        matched = [row for row in rows if self._found[row]]
        self._chooser.observe_lookup(
            [agreement(self._proposals[row], report[row, 2 : 2 + kept[row]]) for row in matched]
        )

    def _look_up(self, count: int) -> None:
        known = self._transcript
        ids = known.ids[:, : int(known.last.max()) + 1]
        self._proposals, found = look_up(ids, known.last[:, None], known.pads[:, None], count)
        self._found = found[:, 0] & ~known.finished
