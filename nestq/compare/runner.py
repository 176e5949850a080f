"""Measures contenders one after the other, and says after each that there is more."""

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nestq.bench.acceptance import Acceptance
from nestq.command_line import fetch
from nestq.compare.contenders import WEIGHTS, Calibration, Contender, by_weights
from nestq.compare.quality import (
    ByteCounter,
    Score,
    acceptance,
    score_target,
    target_policy,
)
from nestq.compare.results import Result, Results
from nestq.compare.speed import Timer
from nestq.kv_policy import KVPolicy
from nestq.pretrained import load_model
from nestq.quantize import quantize_
from nestq.skipping_recipe import draft_and_verify
from nestq.speculative.graphs import release_graphs


@dataclass
class Subject:
    """The model that is compared with itself.

    Attributes:
        model: of 16 bits, or the only weights that are measured.
        prompts: int64 ``[B, context]`` by context; none for random weights, which answer nothing.
        calibration: what quantizing looks at.
        pad_token_id: what shorter rows are filled with.
        checkpoints: folders or hub ids of quantized weights, by their name.
        made: weights that are there already, by their name.
    """

    model: PreTrainedModel
    prompts: dict[int, Tensor]
    calibration: Calibration
    pad_token_id: int = 0
    checkpoints: dict[str, str] = field(default_factory=dict)
    made: dict[str, PreTrainedModel] = field(default_factory=dict)

    def with_weights(self, name: str) -> PreTrainedModel:
        """The model with other weights: loaded, or quantized now."""
        if name in self.made:
            return self.made[name]
        if name in self.checkpoints:
            model, _ = fetch(load_model, self.checkpoints[name])
            return model.to(self.model.device)
        return WEIGHTS[name].made_of(self.model, self.calibration)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        contenders: that are compared.
        contexts: lengths of prompts.
        gamma: draft tokens a round.
        new_tokens: of each row, at most.
        batch_size: prompts that are answered at once.
        timer: of decoding at batch 1; None for no times.
        synthetic_acceptance: share of draft tokens that are accepted at random, where nothing can
            be measured; None for none.
    """

    contenders: Sequence[Contender]
    contexts: Sequence[int]
    gamma: int
    new_tokens: int
    batch_size: int
    timer: Timer | None = None
    synthetic_acceptance: float | None = None

    @property
    def steps(self) -> int:
        """How often :func:`run` yields, if nothing is there yet."""
        return len(self.contenders) * len(self.contexts)


def run(subject: Subject, plan: Plan, results: Results) -> Iterator[str]:
    """Measure what ``results`` does not have; yields names of contenders.

    A name is given before its contender is measured, and an empty string after each result.
    """
    for name, group in by_weights(plan.contenders).items():
        missing = {
            contender: [c for c in plan.contexts if not results.has(contender.name, c)]
            for contender in group
        }
        missing = {contender: contexts for contender, contexts in missing.items() if contexts}
        if not missing:
            continue
        yield f"{name} weights"
        model = subject.with_weights(name)
        scores: dict[tuple[str, int], Score] = {}
        for contender, contexts in missing.items():
            yield contender.name
            drafting = _with_skipping(model, contender, subject.calibration, plan.gamma)
            counter = ByteCounter(drafting, contender)
            for context in contexts:
                start = time.perf_counter()
                result = counter.result(context, plan.gamma, plan.new_tokens)
                result = _measured(drafting, contender, result, subject, plan, scores)
                seconds = time.perf_counter() - start
                results.results.append(replace(result, seconds=seconds))
                yield ""
        del model, drafting, counter
        gc.collect()
        if subject.model.device.type == "cuda":
            torch.cuda.empty_cache()


def _with_skipping(
    model: PreTrainedModel, contender: Contender, calibration: Calibration, gamma: int
) -> PreTrainedModel:
    """The model, or a copy whose draft skips layers."""
    if not contender.skips:
        return model
    copied = copy.deepcopy(model)
    quantize_(copied, draft_and_verify(gamma=gamma), **calibration.arguments())
    return copied


def _measured(
    model: PreTrainedModel,
    contender: Contender,
    result: Result,
    subject: Subject,
    plan: Plan,
    scores: dict[tuple[str, int], Score],
) -> Result:
    """The result with all that is known of the contender."""
    policy = contender.policy(result.context)
    known: dict[str, Any] = {}
    prompts = subject.prompts.get(result.context)
    if prompts is not None:
        key = str(target_policy(policy)), result.context
        if key not in scores:
            scores[key] = score_target(model, prompts, policy)
        known["perplexity"] = scores[key].perplexity
        known["scored_tokens"] = scores[key].predictions
    if _has_draft(result, policy):
        known |= _acceptance(model, prompts, result, subject, plan)
    if plan.timer is not None and WEIGHTS[contender.weights].has_views:
        known["speed"] = plan.timer.time(model, contender, result.context, result.gamma)
    return replace(result, **known)


def _acceptance(
    model: PreTrainedModel,
    prompts: Tensor | None,
    result: Result,
    subject: Subject,
    plan: Plan,
) -> dict[str, Any]:
    """Acceptance on the prompts; without any, the synthetic one, if there is one."""
    if prompts is not None:
        found = acceptance(
            model,
            prompts,
            KVPolicy.parse(result.kv),
            result.gamma,
            plan.new_tokens,
            plan.batch_size,
            subject.pad_token_id,
        )
        release_graphs(model)
        return found
    if plan.synthetic_acceptance is None:
        return {}
    drawn = Acceptance.synthetic(plan.synthetic_acceptance, result.gamma)
    return {
        "acceptance": "synthetic",
        "slot_acceptance": drawn.slot,
        "tokens_per_round": drawn.tokens_per_round,
    }


def _has_draft(result: Result, policy: KVPolicy) -> bool:
    """Whether there is a draft that is not the target; a search may find no layer to skip."""
    if result.draft is None:
        return False
    skips = result.skipped is not None and any(result.skipped.values())
    return skips or WEIGHTS[result.weights].recipe is not None or not policy.drafts_as_target
