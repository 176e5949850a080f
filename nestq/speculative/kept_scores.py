"""Logits and scores of new tokens, for ``output_logits`` and ``output_scores``."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from nestq.speculative.loop import Transcript
from nestq.speculative.round import NestedForward
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import Selection


class KeptScores:
    """The target's logits, and the scores that logits processors make of them, by column.

    A round writes those of all of its tokens; where a draft token is rejected, the next round
    writes over what follows it. The host waits for the device to know where a round begins.

    Args:
        first: column of the first new token.
        scores: applies the logits processors; None to keep no scores.
        logits: whether to keep logits.
    """

    def __init__(self, first: int, scores: ProcessedScores | None, logits: bool) -> None:
        self._first = first
        self._processed = scores
        self.logits: list[Tensor] | None = [] if logits else None
        self.scores: list[Tensor] | None = None if scores is None else []

    @property
    def any(self) -> bool:
        """Whether anything is kept."""
        return self.logits is not None or self.scores is not None

    def over(self, selection: Selection) -> Selection:
        """The selection, which the target's logits come here from; itself if nothing is kept."""
        return _Recorded(selection, self) if self.any else selection

    def add(self, logits: Tensor, ids: Tensor, last: Tensor, ends: Tensor | None = None) -> None:
        """Keep what follows the columns ``last + 0 ... last + n - 1``.

        Args:
            logits: ``[B, n, V]``, the target's.
            ids: int64 ``[B, columns]``.
            last: int64 ``[B, 1]``.
            ends: int64 ``[B, 1]``, columns up to which rows are left as they are; None for none.
        """
        if self.logits is not None:
            self._write(self.logits, logits.float(), last, ends)
        if self.scores is not None and self._processed is not None:
            self._write(self.scores, self._processed(logits, ids, last), last, ends)

    def finish(self, model: NestedForward, transcript: Transcript) -> None:
        """Add what follows the end of rows that ended before others, and cut off what is behind.

        As in transformers it is what the target gives after the row's padding. It takes one more
        forward pass, if rows end at different lengths.
        """
        ends = transcript.last[:, None]
        start, stop = int(ends.min()), int(ends.max())
        if self.any and start < stop:
            device = model.pads.device
            ids = transcript.ids.clamp(min=0).to(device)
            columns = torch.arange(start, stop, device=device)
            logits = model("target", ids[:, start:stop].contiguous(), columns)
            last = torch.full_like(model.pads, start)
            self.add(logits, ids, last, ends.to(device))
        for columns_of in (self.logits, self.scores):
            if columns_of is not None:
                del columns_of[stop + 1 - self._first :]

    def fields(self) -> dict[str, tuple[Tensor, ...]]:
        """``logits`` and ``scores`` that are kept: float32 ``[B, V]`` for each new token."""
        kept = {"logits": self.logits, "scores": self.scores}
        return {name: tuple(values) for name, values in kept.items() if values is not None}

    def _write(self, kept: list[Tensor], values: Tensor, last: Tensor, ends: Tensor | None) -> None:
        count = values.shape[1]
        low, high = torch.stack(last.aminmax()).tolist()
        while len(kept) < high + count + 1 - self._first:
            kept.append(torch.zeros_like(values[:, 0]))
        for column in range(low + 1, high + count + 1):
            offset = column - 1 - last[:, 0]
            here = (offset >= 0) & (offset < count)
            if ends is not None:
                here &= column > ends[:, 0]
            kept[column - self._first][here] = values[here, offset[here]]


class _Recorded:
    """A selection whose target's logits are kept."""

    def __init__(self, selection: Selection, kept: KeptScores) -> None:
        self._selection = selection
        self._kept = kept
        self.key: Hashable = selection.key

    def begin(self, other: Any) -> None:
        self._selection.begin(other)

    def draft(self, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
        return self._selection.draft(logits, ids, column)

    def draft_probability(
        self, logits: Tensor, ids: Tensor, column: Tensor, token: Tensor
    ) -> Tensor:
        return self._selection.draft_probability(logits, ids, column, token)

    def verify(
        self, logits: Tensor, ids: Tensor, last: Tensor, drafts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._kept.add(logits, ids, last)
        return self._selection.verify(logits, ids, last, drafts)
