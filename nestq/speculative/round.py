"""One round of self-speculative decoding: gamma draft steps and one verification.

Token ids are kept in one tensor ``ids`` ``[B, columns]``, padding on the left. The token in column
c of a row has position ``c - pads`` in the model and in the cache. Between rounds the cache holds
keys and values of every known token but the last one, written by the target.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.view import View, nest_view

Select = Callable[[Tensor, Tensor, Tensor], Tensor]


class NestedForward:
    """Forward passes of draft and target, which share the weights and one cache.

    Args:
        model: the Hugging Face model.
        forward: what is called: the model, or what ``torch.compile`` made of it.
        cache: its ``lengths`` say how many positions of each row are verified.
        pads: int64 ``[B, 1]``, padding columns of each row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        cache: NestedKVCache,
        pads: Tensor,
    ) -> None:
        self.forward = forward
        self.cache = cache
        self.pads = pads
        self.context_length = 0
        self.keywords = {cache_keyword(model): cache, "use_cache": True, "return_dict": True}
        self.can_skip_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def last(self) -> Tensor:
        """Column ``[B, 1]`` of the last known token of each row."""
        return self.cache.lengths[:, None] + self.pads

    def update_context_length(self) -> None:
        """Tell the host how long the longest row is, if what a draft reads depends on it."""
        if self.cache.policy.kind == "auto":
            self.context_length = int(self.cache.lengths.max())

    def __call__(
        self,
        view: View,
        tokens: Tensor,
        columns: Tensor,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits ``[B, n, V]`` for tokens ``[B, n]`` in the given columns, by one of the views.

        The cache gets their keys and values; padding, in columns below ``pads``, is not written.
        ``logits_to_keep`` is the number of columns, from the end, to compute logits of; 0 for all.
        """
        positions = columns - self.pads
        keywords = {"logits_to_keep": logits_to_keep} if self.can_skip_logits else {}
        with nest_view(view), self.cache.at(positions, self.context_length):
            # Rotary embeddings have no negative positions; what a pad computes is not used.
            outputs = self.forward(
                input_ids=tokens,
                position_ids=positions.clamp(min=0),
                **self.keywords,
                **keywords,
            )
        return outputs.logits


def prefill(model: NestedForward, tokens: Tensor, chunk: int) -> None:
    """Write prompt tokens ``[B, n]``, from column 0 on, ``chunk`` columns a forward pass."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    for start in range(0, tokens.shape[1], chunk):
        piece = slice(start, start + chunk)
        # A contiguous copy: strides of a slice vary with the length, and compiling depends on them.
        model("target", tokens[:, piece].contiguous(), columns[piece], logits_to_keep=1)
    model.cache.lengths.copy_(tokens.shape[1] - model.pads[:, 0])


def draft(model: NestedForward, ids: Tensor, last: Tensor, gamma: int, select: Select) -> None:
    """Write gamma draft tokens into ``ids``, in the columns after ``last``.

    Keys and values that the draft writes are temporary: verification overwrites them.
    """
    model.update_context_length()
    for column in (last + step for step in range(gamma)):
        logits = model("draft", ids.gather(1, column), column)
        ids.scatter_(1, column + 1, select(logits, ids, column))


def verify(
    model: NestedForward, ids: Tensor, last: Tensor, gamma: int, select: Select
) -> tuple[Tensor, Tensor]:
    """The target's own tokens after ``last`` and after each draft token.

    Returns:
        tokens int64 ``[B, gamma + 1]``: as far as drafts are accepted they equal these tokens, so a
        row may keep one more than it accepts: the recovered or the bonus token. accepted bool
        ``[B, gamma]``: whether the target agrees with a draft token and all before it.
    """
    columns = last + torch.arange(gamma + 1, device=ids.device)
    block = ids.gather(1, columns)
    tokens = select(model("target", block, columns), ids, last)
    accepted = (block[:, 1:] == tokens[:, :-1]).cumprod(1).bool()
    return tokens, accepted
