"""What rounds read and write on the device, and what the host gets to know of it."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from nestq.kv_caches import KVCache

# No token: what fills the list of end-of-sequence tokens.
NO_TOKEN = -1


class DecodingState:
    """The tensors of one call. Rounds change them in place, so that a CUDA graph can be replayed.

    Args:
        cache: of the call; its ``lengths`` say how many positions of each row are verified.
        columns: that ``ids`` can hold: the maximum length and the tokens of a round.
        gamma: draft tokens a round, at most.
        ends: end-of-sequence tokens there may be.

    Attributes:
        ids: int64 ``[B, columns]``, prompts and new tokens, padding on the left.
        pads: int64 ``[B, 1]``, padding columns of each row.
        finished: bool ``[B]``.
        max_length: int64 scalar, columns that a sequence may have.
        pad_token: int64 scalar, what fills the columns behind a sequence.
        eos: int64 ``[ends]``, end-of-sequence tokens, filled up with ``NO_TOKEN``.
        rounds: int64 scalar, rounds of unfinished rows so far.
        drafted_per_position: int64 ``[gamma]``, rounds of unfinished rows that drafted a token
            there.
        accepted_per_position: int64 ``[gamma]``, and how many of these tokens were accepted.
        report: int64 ``[B, gamma + 3]`` of the last round: tokens kept, whether the row is
            finished, and the target's gamma + 1 tokens. What a round with fewer draft tokens leaves
            at the end is of no meaning.
    """

    def __init__(self, cache: KVCache, columns: int, gamma: int, ends: int) -> None:
        batch, device = len(cache.lengths), cache.lengths.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.cache = cache
        self.ids = zeros(batch, columns)
        self.pads = zeros(batch, 1)
        self.finished = zeros(batch, dtype=torch.bool)
        self.max_length = zeros() + columns - gamma - 1
        self.pad_token = zeros()
        self.eos = zeros(ends)
        self.rounds = zeros()
        self.drafted_per_position = zeros(gamma)
        self.accepted_per_position = zeros(gamma)
        self.report = zeros(batch, gamma + 3)
        self.offsets = torch.arange(1, gamma + 2, device=device)

    def begin(
        self, tokens: Tensor, pads: Tensor, max_length: int, pad_token: int, eos: list[int]
    ) -> None:
        """Forget the last call and set up the next one.

        Args:
            tokens: int64 ``[B, n]``, prompts.
            pads: int64 ``[B, 1]``.
            max_length: columns that a sequence may have.
            pad_token: for finished rows.
            eos: end-of-sequence tokens, no more than there is room for.
        """
        self.ids.fill_(pad_token)
        self.ids[:, : tokens.shape[1]] = tokens
        self.pads.copy_(pads)
        self.max_length.fill_(max_length)
        self.pad_token.fill_(pad_token)
        padded = eos + [NO_TOKEN] * (len(self.eos) - len(eos))
        self.eos.copy_(torch.tensor(padded, dtype=torch.int64))
        for tensor in (self.finished, self.rounds, self.cache.lengths):
            tensor.zero_()
        self.drafted_per_position.zero_()
        self.accepted_per_position.zero_()

    def last(self) -> Tensor:
        """Column ``[B, 1]`` of the last known token of each row."""
        return self.cache.lengths[:, None] + self.pads

    def keep(
        self, last: Tensor, tokens: Tensor, accepted: Tensor, drafts: Tensor | None = None
    ) -> None:
        """Add what a round gave: as many of its tokens as are accepted, and one more.

        A row ends at its first end-of-sequence token and at the maximum length.

        Args:
            last: int64 ``[B, 1]``, column of the last token before the round.
            tokens: int64 ``[B, n + 1]`` for a round of n <= gamma draft tokens, the target's.
            accepted: bool ``[B, n]``, draft tokens that are kept, up to the first that is not.
            drafts: int64 ``[B, 1]``, draft tokens of each row; None if each has n.
        """
        count = accepted.shape[1]
        offsets = self.offsets[: count + 1]
        unfinished = ~self.finished
        accepted = accepted & unfinished[:, None]
        drafted = unfinished[:, None].expand_as(accepted)
        if drafts is not None:
            drafted = drafted & (offsets[:-1] <= drafts)
        self.drafted_per_position[:count] += drafted.sum(0)
        self.accepted_per_position[:count] += accepted.sum(0)
        self.rounds += unfinished.sum()

        room = self.max_length - 1 - last[:, 0]
        is_eos = (tokens[:, :, None] == self.eos).any(-1)
        # Tokens up to and including the first end-of-sequence token.
        through_eos = (is_eos.cumsum(1) - is_eos.long() == 0).sum(1)
        limit = torch.minimum(room, through_eos)
        kept = torch.minimum(accepted.sum(1) + 1, limit).masked_fill(self.finished, 0)
        has_eos = is_eos.any(1) & (kept == through_eos)
        self.finished |= has_eos | (kept == room)

        behind = offsets > kept[:, None]
        # An undefined token is below 0; the host raises an error at it, once it gets to see it.
        kept_tokens = torch.where(behind, self.pad_token, tokens.clamp(min=0))
        self.ids.scatter_(1, last + offsets, kept_tokens)
        self.cache.lengths += kept
        self.report[:, 0] = kept
        self.report[:, 1] = self.finished
        self.report[:, 2 : count + 3] = tokens

    def end_row(self, row: int, column: int) -> None:
        """End a row at a column that it has reached, and forget what is behind it."""
        self.ids[row, column + 1 :] = self.pad_token
        self.cache.lengths[row] = column - self.pads[row, 0]
        self.finished[row] = True


class Reports:
    """Brings reports to the host, in order; the device goes on meanwhile.

    Args:
        report: where each round leaves its report.
    """

    def __init__(self, report: Tensor) -> None:
        self._report = report
        self._sent: deque[tuple[Tensor, Any]] = deque()

    def send(self) -> None:
        """Send what the report holds once the work that is queued now is done."""
        if self._report.device.type == "cpu":
            self._sent.append((self._report.clone(), None))
            return
        shape = self._report.shape
        copy = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
        copy.copy_(self._report, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._sent.append((copy, event))

    def __len__(self) -> int:
        """Reports on their way."""
        return len(self._sent)

    def receive(self) -> Tensor:
        """The oldest report that was sent, when it is there."""
        report, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        return report
