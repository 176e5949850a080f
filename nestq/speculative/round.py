"""One round of self-speculative decoding: gamma draft steps and one verification.

Token ids are kept in one tensor ``ids`` ``[B, columns]``, padding on the left. The token in column
c of a row has position ``c - pads`` in the model and in the cache. Between rounds the cache holds
keys and values of every known token but the last one, written by the target.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_cache import cache_keyword
from nestq.kv_caches import KVCache
from nestq.speculative.selection import Selection
from nestq.speculative.state import DecodingState
from nestq.view import View, nest_view


class NestedForward:
    """Forward passes of draft and target, which share the weights and one cache.

    Args:
        model: the Hugging Face model.
        forward: what is called: the model, or what ``torch.compile`` made of it.
        cache: its ``lengths`` say how many positions of each row are verified.
        pads: int64 ``[B, 1]``, padding columns of each row.

    Attributes:
        context_length: cached positions of the longest row as the host knows them; what a draft
            reads may depend on it, and no result does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        cache: KVCache,
        pads: Tensor,
    ) -> None:
        self.forward = forward
        self.cache = cache
        self.pads = pads
        self.context_length = 0
        self.keywords = {cache_keyword(model): cache, "use_cache": True, "return_dict": True}
        self.can_skip_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self,
        view: View,
        tokens: Tensor,
        columns: Tensor,
        logits_to_keep: int = 0,
        any_length: bool = False,
    ) -> Tensor:
        """Logits ``[B, n, V]`` for tokens ``[B, n]`` in the given columns, by one of the views.

        The cache gets their keys and values; padding, in columns below ``pads``, is not written.
        ``logits_to_keep`` is the number of columns, from the end, to compute logits of; 0 for all.
        With ``any_length`` what compiles the model makes code for any number of tokens from 2 on.
        """
        return self.run(view, {"input_ids": tokens}, columns, logits_to_keep, any_length)

    def run(
        self,
        view: View,
        inputs: dict[str, Any],
        columns: Tensor,
        logits_to_keep: int = 0,
        any_length: bool = False,
    ) -> Tensor:
        """The same for inputs of any kind, by their names in the model's forward pass."""
        positions = columns - self.pads
        keywords = {"logits_to_keep": logits_to_keep} if self.can_skip_logits else {}
        # Rotary embeddings have no negative positions; what a pad computes is not used.
        position_ids = positions.clamp(min=0)
        if any_length:
            for tensor in (*inputs.values(), positions, position_ids):
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        with nest_view(view), self.cache.at(positions, self.context_length):
            outputs = self.forward(
                **inputs,
                position_ids=position_ids,
                **self.keywords,
                **keywords,
            )
        return outputs.logits


class Drafts(NamedTuple):
    """What was drafted in a round.

    Attributes:
        columns: that have draft tokens of any row.
        per_row: int64 ``[B, 1]``, draft tokens of each row; None if each has all columns.
    """

    columns: int
    per_row: Tensor | None = None


class Round:
    """One round over a decoding state. The host waits for nothing unless the selection does.

    Args:
        model: forward passes of both views, over the state's cache.
        state: what the round reads and writes.
        gamma: draft tokens.
        selection: how tokens are chosen.
        watch: a context for each phase, ``"draft"`` and ``"verification"``.
        verifier: the view that verifies; with gamma 0 any view can decode alone.
    """

    def __init__(
        self,
        model: NestedForward,
        state: DecodingState,
        gamma: int,
        selection: Selection,
        watch: Callable[[str], AbstractContextManager[None]],
        verifier: View = "target",
    ) -> None:
        self.model = model
        self.state = state
        self.gamma = gamma
        self.selection = selection
        self.watch = watch
        self.verifier: View = verifier

    def __call__(self, context_length: int) -> None:
        """Draft, verify and keep what is accepted.

        Args:
            context_length: cached positions of the longest row, as the host knows them.
        """
        self.model.context_length = context_length
        last = self.state.last()
        with self.watch("draft"):
            drafts = self.draft(last)
        with self.watch("verification"):
            tokens, accepted = self.verify(last, drafts)
        self.state.keep(last, tokens, accepted, drafts.per_row)

    def draft(self, last: Tensor) -> Drafts:
        """Write draft tokens into ``ids``, in the columns after ``last``.

        Keys and values that the draft writes are temporary: verification overwrites them.
        """
        ids = self.state.ids
        for column in (last + step for step in range(self.gamma)):
            logits = self.model("draft", ids.gather(1, column), column)
            ids.scatter_(1, column + 1, self.selection.draft(logits, ids, column))
        return Drafts(self.gamma)

    def verify(self, last: Tensor, drafts: Drafts | None = None) -> tuple[Tensor, Tensor]:
        """The verifier's tokens after ``last`` and each draft token, and what is accepted.

        Args:
            last: int64 ``[B, 1]``, column of the last known token.
            drafts: what was drafted; None for gamma tokens.
        """
        drafts = drafts or Drafts(self.gamma)
        ids = self.state.ids
        columns = last + self.state.offsets[: drafts.columns + 1] - 1
        logits = self.model(self.verifier, ids.gather(1, columns), columns)
        return self.selection.verify(logits, ids, last, drafts.per_row)
