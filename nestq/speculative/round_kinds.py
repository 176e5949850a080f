"""The kinds of rounds: how many tokens are drafted, and by whom."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

from nestq.speculative.draft_stop import StoppingRound
from nestq.speculative.prompt_lookup import LookupRound
from nestq.speculative.round import NestedForward, Round
from nestq.speculative.selection import Selection
from nestq.speculative.state import DecodingState

# What "auto" chooses from. On a GPU each is a CUDA graph, which takes up to a second to capture.
AUTO_GAMMAS = (0, 1, 2, 4, 6, 8)


class RoundKind(NamedTuple):
    """A kind of round.

    Attributes:
        tokens: draft tokens.
        lookup: whether they are looked up in the row's own ids, in place of the draft's.
    """

    tokens: int
    lookup: bool = False


def kinds_of(gamma: int | Literal["auto"], prompt_lookup: int) -> tuple[RoundKind, ...]:
    """The kinds that a call chooses from, at least one."""
    gammas = AUTO_GAMMAS if gamma == "auto" else (gamma,)
    lookups = (RoundKind(prompt_lookup, lookup=True),) if prompt_lookup else ()
    return (*(RoundKind(tokens) for tokens in gammas), *lookups)


def round_of(
    kind: RoundKind,
    model: NestedForward,
    state: DecodingState,
    selection: Selection,
    watch: Callable[[str], AbstractContextManager[None]],
    draft_stop: float | None = None,
) -> Round:
    """A round of a kind; arguments as in :class:`Round` and :class:`StoppingRound`."""
    if kind.lookup:
        return LookupRound(model, state, kind.tokens, selection, watch)
    if draft_stop is not None:
        return StoppingRound(model, state, kind.tokens, selection, watch, draft_stop)
    return Round(model, state, kind.tokens, selection, watch)
