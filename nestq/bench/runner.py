"""Measures one model in all situations of a plan."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from nestq.bench.acceptance import Acceptance
from nestq.bench.energy import EnergyMeter
from nestq.bench.measure import Case, Decoder, measure, measure_prefill
from nestq.bench.models import Compiler, Source, compiling, ready
from nestq.bench.report import Prefill, Results
from nestq.evaluation import NEW_TOKENS_A_PROMPT, measure_acceptance, prompts_to_answer
from nestq.speculative.graphs import release_graphs

ACCEPTANCE_BATCH = 16


@dataclass(frozen=True)
class Plan:
    """What is measured of each model.

    Attributes:
        cases: the situations.
        rounds: timed calls of each step.
        synthetic_acceptance: share of draft tokens that are accepted at random; None to measure it
            where a model has weights.
        new_tokens: tokens to generate for a measured acceptance, about.
        prefill_tokens: length of the prompt that is timed; 0 for none.
        compiler: of the nested model. The 16-bit one is always compiled by Inductor, unless this is
            ``"none"``.
    """

    cases: Sequence[Case]
    rounds: int
    synthetic_acceptance: float | None
    new_tokens: int
    prefill_tokens: int
    compiler: Compiler

    @property
    def steps(self) -> int:
        """Measurements of a model."""
        return len(self.cases) + len(self.kinds) * bool(self.prefill_tokens)

    @property
    def kinds(self) -> list[bool]:
        """The models that are needed: nested (False), then dense (True)."""
        return sorted({case.system == "16-bit" for case in self.cases})


def measure_source(
    source: Source, plan: Plan, device: torch.device, energy: EnergyMeter, results: Results
) -> Iterator[None]:
    """Measure a model in every case, and yield after each measurement that ``results`` got.

    The nested model comes first, with its prompts, which may be missing. It is gone before there is
    a dense one: peak memory is that of one model.
    """
    for dense in plan.kinds:
        tokenizer: Any = None
        if dense:
            model = source.dense(device)
        else:
            model, tokenizer = source.nested(device)
        with compiling():
            acceptances = {} if dense else _acceptances(model, tokenizer, plan)
            decoder = Decoder(source.name, source.weights, model, ready(model, plan.compiler))
            for case in plan.cases:
                if (case.system == "16-bit") == dense:
                    acceptance = acceptances.get((case.gamma, case.kv))
                    results.measurements.append(
                        measure(decoder, case, acceptance, plan.rounds, energy)
                    )
                    yield
            if plan.prefill_tokens:
                time = measure_prefill(decoder, plan.prefill_tokens)
                system = "16-bit" if dense else "w8a8"
                results.prefills.append(
                    Prefill(source.name, source.weights, system, plan.prefill_tokens, time)
                )
                yield
        del model, decoder
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _acceptances(
    model: PreTrainedModel, tokenizer: Any, plan: Plan
) -> dict[tuple[int, str | None], Acceptance]:
    """By gamma and what drafts read of the cache; nothing where it is not known."""
    drafting = dict.fromkeys((case.gamma, case.kv) for case in plan.cases if case.gamma)
    if plan.synthetic_acceptance is not None:
        slot = plan.synthetic_acceptance
        return {pair: Acceptance.synthetic(slot, pair[0]) for pair in drafting}
    if tokenizer is None or not drafting:
        return {}
    prompts = prompts_to_answer(tokenizer, plan.new_tokens)
    # A model without a pad token is padded with any other: the mask hides it.
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad_token_id = next(token for token in pads if token is not None)
    found = {}
    for gamma, kv in drafting:
        metrics = measure_acceptance(
            model,
            prompts,
            max_new_tokens=NEW_TOKENS_A_PROMPT,
            pad_token_id=pad_token_id,
            gamma=gamma,
            kv=kv or "kv8/kv8",
            batch_size=ACCEPTANCE_BATCH,
        )
        assert metrics.slot_acceptance is not None
        # Half of the answer lies before a draft token of it, on average.
        tokens_before = (sum(map(len, prompts)) + metrics.tokens / 2) / len(prompts)
        found[gamma, kv] = Acceptance(
            "measured", gamma, metrics.slot_acceptance, context=round(tokens_before)
        )
    release_graphs(model)
    return found
