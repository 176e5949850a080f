"""Draft tokens from the text so far: what followed its last tokens when they occurred before.

Prompt lookup (Saxena, 2023, "Prompt lookup decoding"): where a text repeats itself, as summaries,
edits and code do, no model is needed to draft.
"""

import torch
from torch import Tensor

from nestq.speculative.round import Drafts, Round

# Tokens that must be the same at an earlier place, and how many more make a place better.
LEAST = 2
MOST = 3


def look_up(ids: Tensor, last: Tensor, pads: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens that may follow each row. The host waits for nothing.

    The place with the most equal tokens before it is taken, up to ``MOST``; of equal places the
    last. Where it is less than ``count`` tokens from the end, the text is taken to repeat itself.

    Args:
        ids: int64 ``[B, columns]``.
        last: int64 ``[B, 1]``, column of the last known token of each row.
        pads: int64 ``[B, 1]``, padding columns of each row.
        count: tokens to propose.

    Returns:
        int64 ``[B, count]``, and bool ``[B, 1]``, false for rows that have no such place and whose
        tokens are of no meaning.
    """
    width = ids.shape[1]
    columns = torch.arange(width, device=ids.device)
    same = columns < last
    length = torch.zeros_like(ids)
    for back in range(MOST):
        token = ids.gather(1, (last - back).clamp(min=0))
        same = same & (ids.roll(back, 1) == token) & (columns - back >= pads)
        length += same
    place = (length * width + columns).argmax(1, keepdim=True)
    found = length.gather(1, place) >= LEAST
    distance = (last - place).clamp(min=1)
    behind = place + 1 + torch.arange(count, device=ids.device) % distance
    return ids.gather(1, behind.clamp(max=width - 1)), found


def agreement(proposals: Tensor, tokens: Tensor) -> tuple[int, int]:
    """How many proposals would have been accepted from the first on, and how many judged.

    Args:
        proposals: int64 ``[count]`` of a row.
        tokens: int64 ``[n]``, what was generated then.
    """
    judged = min(len(proposals), len(tokens))
    same = int((proposals[:judged] == tokens[:judged]).cumprod(0).sum())
    return same, min(same + 1, judged)


class LookupRound(Round):
    """A round that verifies tokens from the row's own text. Rows without any get one token.

    What is proposed depends on the known tokens alone. Sampling stays exact: the distribution of a
    proposal is a point mass, so that it is accepted with the target's probability of it, and
    otherwise replaced by another token, sampled from the target's.
    """

    def draft(self, last: Tensor) -> Drafts:
        """Write proposals into ``ids``, in the columns after ``last``."""
        ids = self.state.ids
        proposals, found = look_up(ids, last, self.state.pads, self.gamma)
        ids.scatter_(1, last + self.state.offsets[: self.gamma], proposals)
        return Drafts(self.gamma, found * self.gamma)
