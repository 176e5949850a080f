"""What a contender is worth without a clock: perplexity, acceptance, bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from nestq.attention import nested_attention_implementation
from nestq.bench.bytes_read import cache_tensors, kv_bytes
from nestq.compare.contenders import WEIGHTS, Contender
from nestq.compare.results import BytesRead, Result
from nestq.compare.weights_read import stored_weight_bytes, weight_bytes_read
from nestq.evaluation import measure_acceptance
from nestq.kv_caches import new_cache
from nestq.kv_policy import KVPolicy
from nestq.layer_skipping import skipped_in_draft
from nestq.speculative.round import NestedForward
from nestq.view import View

# Tokens whose logits are there at the same time.
SCORED_AT_ONCE = 256
_NESTED = ("kv8", "kv4", "recent", "auto")


@dataclass(frozen=True)
class Score:
    """Next-token prediction of the target on the prompts.

    Attributes:
        nats: summed cross entropy.
        predictions: tokens predicted.
    """

    nats: float
    predictions: int

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean cross entropy."""
        return math.exp(self.nats / self.predictions)


def target_policy(policy: KVPolicy) -> KVPolicy:
    """A policy whose target reads the same: it tells which scores are equal."""
    return KVPolicy("kv8") if policy.kind in _NESTED else policy.stored()


def score_target(model: PreTrainedModel, contexts: Tensor, policy: KVPolicy) -> Score:
    """Score the target on prompts, row by row.

    A cache of 16 bits changes no number but by rounding: then transformers computes, outside of
    views, which is far faster on a CPU and knows models that decode without views.

    Args:
        model: whose target is scored.
        contexts: int64 ``[B, n]``, n >= 2.
        policy: of the cache.
    """
    if policy.kind == "dense":
        return score_plainly(model, contexts)
    return score_in_engine(model, contexts, policy)


@torch.no_grad()
def score_in_engine(model: PreTrainedModel, contexts: Tensor, policy: KVPolicy) -> Score:
    """Score the target as decoding computes it, with its cache, row by row.

    Args:
        model: that decodes in the engine.
        contexts: int64 ``[B, n]``, n >= 2.
        policy: of the cache.
    """
    config = model.config.get_text_config(decoder=True)
    pads = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    nats = 0.0
    for row in contexts.to(model.device):
        cache = new_cache(policy, config, len(row), 1, model.device, model.dtype)
        forward = NestedForward(model, model, cache, pads)
        columns = torch.arange(len(row), device=model.device)[None]
        with nested_attention_implementation(model):
            for start in range(0, len(row), SCORED_AT_ONCE):
                block = columns[:, start : start + SCORED_AT_ONCE]
                forward.context_length = start
                nats += _nats(forward("target", row[block], block)[0], row, start)
    return Score(nats, contexts.numel() - len(contexts))


@torch.no_grad()
def score_plainly(model: PreTrainedModel, contexts: Tensor) -> Score:
    """Score any transformers model, row by row."""
    nats = 0.0
    for row in contexts.to(model.device):
        logits = model(input_ids=row[None], use_cache=False).logits[0]
        nats += _nats(logits, row, 0)
    return Score(nats, contexts.numel() - len(contexts))


def _nats(logits: Tensor, row: Tensor, start: int) -> float:
    """Cross entropy of the tokens after those from ``start`` on, as far as the row has them."""
    following = row[start + 1 : start + 1 + len(logits)]
    return F.cross_entropy(logits[: len(following)].float(), following, reduction="sum").item()


def cache_bytes(model: PreTrainedModel, policy: KVPolicy, length: int) -> int:
    """Bytes of the cache of one row with room for so many tokens."""
    config = model.config.get_text_config(decoder=True)
    cache = new_cache(policy, config, length, 1, torch.device("meta"), model.dtype)
    return sum(tensor.nbytes for tensor in cache_tensors(cache))


class ByteCounter:
    """Bytes that a model reads and stores.

    What its weights cost is found once, by a step of each view.

    Args:
        model: whose draft skips what it skips now.
        contender: whose weights it has.
    """

    def __init__(self, model: PreTrainedModel, contender: Contender) -> None:
        self.model = model
        self.contender = contender
        has_views = WEIGHTS[contender.weights].has_views
        self.stored = stored_weight_bytes(model)
        self.target = weight_bytes_read(model, "target" if has_views else None)
        self.draft = weight_bytes_read(model, "draft") if contender.drafts else 0
        self.skipped = skipped_in_draft(model) if contender.skips else None

    def result(self, context: int, gamma: int, new_tokens: int) -> Result:
        """A result that has nothing but bytes.

        Args:
            context: tokens before a step.
            gamma: draft tokens of a round, unless the contender has its own.
            new_tokens: that the cache has room for besides.
        """
        contender = self.contender
        policy = contender.policy(context)
        draft = verification = None
        if contender.drafts:
            gamma = gamma if contender.gamma is None else contender.gamma
            draft = self._read("draft", policy, context, 1)
            verification = self._read("target", policy, context, gamma + 1)
        return Result(
            name=contender.name,
            weights=contender.weights,
            kv=str(policy),
            context=context,
            gamma=gamma if contender.drafts else 0,
            weight_bytes=self.stored,
            cache_bytes=cache_bytes(self.model, policy, context + new_tokens),
            step=self._read("target", policy, context, 1),
            draft=draft,
            verification=verification,
            skipped=self.skipped,
            tokens_per_round=None if contender.drafts else 1.0,
        )

    def _read(self, view: View, policy: KVPolicy, context: int, tokens: int) -> BytesRead:
        """What a view reads in a pass of so many tokens."""
        config = self.model.config.get_text_config(decoder=True)
        skipped = self.skipped["attention"] if self.skipped and view == "draft" else ()
        cache = kv_bytes(config, policy, view, context, tokens, 1, self.model.dtype, skipped)
        return BytesRead(self.draft if view == "draft" else self.target, cache)


def acceptance(
    model: PreTrainedModel,
    contexts: Tensor,
    policy: KVPolicy,
    gamma: int,
    new_tokens: int,
    batch_size: int,
    pad_token_id: int,
) -> dict[str, Any]:
    """Continue all prompts speculatively; what a :class:`Result` says of it.

    Args:
        model: in which draft and target differ, or the policy makes them.
        contexts: int64 ``[B, n]``.
        policy: of the cache.
        gamma: draft tokens a round.
        new_tokens: of each row, at most.
        batch_size: rows at once.
        pad_token_id: what shorter rows are filled with.
    """
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    prompts: Sequence[Sequence[int]] = contexts.tolist()
    metrics = measure_acceptance(
        model,
        prompts,
        max_new_tokens=new_tokens,
        pad_token_id=pad_token_id,
        gamma=gamma,
        kv=str(policy),
        batch_size=batch_size,
        progress=False,
    )
    return {
        "acceptance": "measured",
        "slot_acceptance": metrics.slot_acceptance,
        "tokens_per_round": metrics.tokens_per_round,
        "acceptance_per_position": metrics.acceptance_per_position,
        "new_tokens": metrics.tokens,
        "measured_peak_bytes": torch.cuda.max_memory_allocated(model.device) if on_gpu else None,
    }
