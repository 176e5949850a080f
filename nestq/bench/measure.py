"""Decoding speed of one model in one situation: a step, a round, a prefill."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from nestq.attention import nested_attention_implementation
from nestq.bench.acceptance import Acceptance, SyntheticSelection
from nestq.bench.bytes_read import cache_tensors, kv_bytes, weight_bytes
from nestq.bench.energy import EnergyMeter
from nestq.bench.timing import captured, milliseconds
from nestq.kv_cache import NestedKVCache
from nestq.kv_caches import new_cache
from nestq.kv_policy import KVPolicy
from nestq.speculative.requests import MAX_GAMMA
from nestq.speculative.round import NestedForward, Round
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection
from nestq.speculative.state import DecodingState, Reports
from nestq.tensor import NestedQuantTensor
from nestq.view import View

System = Literal["16-bit", "w8a8", "w4a8", "speculative"]
SYSTEMS = get_args(System)
# Room for end-of-sequence tokens, of which there are none: as many as most models have.
ENDS = 4
# All caches of a context have one capacity, so that compiled graphs serve all of its cases.
CAPACITY_STEP = 64
PREFILL_CALLS = 5


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        system: ``"16-bit"``, ``"w8a8"`` and ``"w4a8"`` decode one token a step: a dense model, the
            target alone, the draft alone. ``"speculative"`` drafts and verifies.
        context: cached positions of each row.
        batch: rows.
        gamma: draft tokens a round; 0 for systems that do not draft.
        kv: what the draft reads of the cache; None for systems without one.
    """

    system: System
    context: int
    batch: int
    gamma: int = 0
    kv: str | None = None

    @property
    def policy(self) -> KVPolicy:
        """Of the cache."""
        default = "16/16" if self.system == "16-bit" else "kv8/kv8"
        return KVPolicy.parse(self.kv or default)

    @property
    def view(self) -> View:
        """What computes the step, or verifies."""
        return "draft" if self.system == "w4a8" else "target"


def cases(
    systems: Sequence[System],
    contexts: Sequence[int],
    batches: Sequence[int],
    gammas: Sequence[int],
    policies: Sequence[str],
) -> list[Case]:
    """All situations of a model, each once."""
    found = []
    for context, batch, system in itertools.product(contexts, batches, systems):
        drafts = policies if system in ("w4a8", "speculative") else (None,)
        counts = gammas if system == "speculative" else (0,)
        for kv, gamma in itertools.product(drafts, counts):
            found.append(Case(system, context, batch, gamma, kv))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Step:
    """Time of a forward pass, or of several.

    Attributes:
        milliseconds: measured.
        bytes_read: that it must read.
    """

    milliseconds: float
    bytes_read: int

    @property
    def terabytes_per_second(self) -> float:
        """What it must read / its time."""
        return self.bytes_read / self.milliseconds / 1e9

    def floor(self, bandwidth: float) -> float:
        """Milliseconds that reading takes at a bandwidth in TB/s."""
        return self.bytes_read / bandwidth / 1e9


@dataclass(frozen=True)
class Measurement:
    """What was measured of a case.

    Attributes:
        model: its name.
        weights: ``"random"`` or ``"checkpoint"``.
        case: the situation.
        round: one round; for systems that do not draft it is one step, and gives one token.
        draft: one draft step, or None.
        verification: or None.
        acceptance: of draft tokens; None if it is not known or nothing is drafted.
        drawn_slot_acceptance: what a synthetic acceptance was in the rounds that were timed.
        peak_bytes: most memory in use, weights and cache included; None on a CPU.
        joules_per_round: of the whole batch; None where it cannot be measured.
    """

    model: str
    weights: str
    case: Case
    round: Step
    draft: Step | None = None
    verification: Step | None = None
    acceptance: Acceptance | None = None
    drawn_slot_acceptance: float | None = None
    peak_bytes: int | None = None
    joules_per_round: float | None = None

    @property
    def tokens_per_round(self) -> float | None:
        """Of one row; None if acceptance is not known."""
        if not self.case.gamma:
            return 1.0
        return None if self.acceptance is None else self.acceptance.tokens_per_round

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole batch; None if acceptance is not known."""
        if self.tokens_per_round is None:
            return None
        return 1000 * self.case.batch * self.tokens_per_round / self.round.milliseconds

    @property
    def joules_per_token(self) -> float | None:
        """None if energy or acceptance is not known."""
        if self.joules_per_round is None or self.tokens_per_round is None:
            return None
        return self.joules_per_round / (self.case.batch * self.tokens_per_round)

    def steps(self) -> dict[str, Step]:
        """The forward passes by name, those of a round before the round itself."""
        parts = {"draft step": self.draft, "verification": self.verification}
        known = {name: step for name, step in parts.items() if step is not None}
        return known | {"round" if self.case.gamma else "step": self.round}


@dataclass(frozen=True)
class Decoder:
    """A model that is measured.

    Attributes:
        name: of the model.
        weights: ``"random"`` or ``"checkpoint"``.
        model: dense or nested.
        forward: what computes: the model, or what ``torch.compile`` made of it.
    """

    name: str
    weights: str
    model: PreTrainedModel
    forward: Callable[..., Any]


@torch.no_grad()
def measure(
    decoder: Decoder, case: Case, acceptance: Acceptance | None, rounds: int, energy: EnergyMeter
) -> Measurement:
    """Measure a case; its cache holds random numbers, since speed does not depend on them.

    On a GPU each kind of step is a CUDA graph that is replayed. Before each call the cache is set
    back to the context. Rounds are timed as decoding runs them, with the report to the host.

    Args:
        decoder: dense for the system ``"16-bit"``, else nested.
        case: the situation.
        acceptance: of draft tokens; a synthetic one is drawn.
        rounds: calls of each step that are timed; the median counts.
        energy: of the device.
    """
    model = decoder.model
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    state = _decoding_state(model, case)
    forward = NestedForward(model, decoder.forward, state.cache, state.pads)
    forward.context_length = case.context
    selection = _selection(acceptance, device)
    one_round, one_draft = (
        Round(forward, state, gamma, selection, lambda _: nullcontext(), case.view)
        for gamma in (case.gamma, 1)
    )

    def at_context(run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            state.cache.lengths.fill_(case.context)
            run()

        return captured(call, device)

    with nested_attention_implementation(model):
        run_round = at_context(lambda: one_round(case.context))
        reports = Reports(state.report)

        def decode_round() -> None:
            run_round()
            reports.send()
            if len(reports) > 1:  # the host looks at a round while the next one runs
                reports.receive()

        state.rounds.zero_()
        state.accepted_per_position.zero_()
        round_time = milliseconds(decode_round, rounds, device)
        drafted, accepted = case.gamma * int(state.rounds), int(state.accepted_per_position.sum())
        draft_time = verification_time = None
        if case.gamma:
            run_draft = at_context(lambda: one_draft.draft(state.last()))
            draft_time = milliseconds(run_draft, rounds, device)
            run_verification = at_context(lambda: one_round.verify(state.last()))
            verification_time = milliseconds(run_verification, rounds, device)
        joules = energy.joules_per_call(decode_round, round_time)

    verification_bytes = step_bytes(model, case, case.view, case.gamma + 1)
    draft_bytes = step_bytes(model, case, "draft", 1) if case.gamma else 0
    synthetic = acceptance is not None and acceptance.kind == "synthetic"
    return Measurement(
        model=decoder.name,
        weights=decoder.weights,
        case=case,
        round=Step(round_time, case.gamma * draft_bytes + verification_bytes),
        draft=None if draft_time is None else Step(draft_time, draft_bytes),
        verification=(
            None if verification_time is None else Step(verification_time, verification_bytes)
        ),
        acceptance=acceptance,
        drawn_slot_acceptance=accepted / drafted if synthetic and drafted else None,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        joules_per_round=joules,
    )


def step_bytes(model: PreTrainedModel, case: Case, view: View, tokens: int) -> int:
    """Bytes that a forward pass of ``tokens`` tokens a row must read at a case's context."""
    config = model.config.get_text_config(decoder=True)
    kv = kv_bytes(config, case.policy, view, case.context, tokens, case.batch, model.dtype)
    return weight_bytes(model, view) + kv


def _selection(acceptance: Acceptance | None, device: torch.device) -> GreedySelection:
    scores = ProcessedScores(LogitsProcessorList(), device)
    if acceptance is None or acceptance.per_token is None:
        return GreedySelection(scores)
    return SyntheticSelection(scores, acceptance.per_token)


def _decoding_state(model: PreTrainedModel, case: Case) -> DecodingState:
    """A state whose rows have random tokens and a random cache."""
    config = model.config.get_text_config(decoder=True)
    device, batch = model.device, case.batch
    columns = case.context + 2 * (MAX_GAMMA + 1) + 1
    columns += -columns % CAPACITY_STEP
    cache = new_cache(case.policy, config, columns, batch, device, model.dtype)
    for tensor in cache_tensors(cache):
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256)
        elif tensor.dtype == torch.float32:
            tensor.uniform_(0.1, 0.3)  # a scale: codes of the base go up to 7
        elif tensor.is_floating_point():
            tensor.normal_()
    state = DecodingState(cache, columns, case.gamma, ENDS)
    pads = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    state.begin(_random_tokens(model, batch, case.context + 1), pads, columns - case.gamma, 0, [])
    return state


def _random_tokens(model: PreTrainedModel, batch: int, count: int) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (batch, count), device=model.device)


@torch.no_grad()
def measure_prefill(decoder: Decoder, tokens: int) -> float:
    """Milliseconds of a prompt of so many tokens, batch 1.

    A nested model fills its cache, through its target. A dense one computes as transformers does,
    with PyTorch's matrix products and attention, and without a cache.
    """
    model = decoder.model
    ids = _random_tokens(model, 1, tokens)
    if not any(isinstance(weight, NestedQuantTensor) for weight in model.parameters()):
        return milliseconds(
            lambda: decoder.forward(input_ids=ids, use_cache=False, logits_to_keep=1),
            PREFILL_CALLS,
            model.device,
        )
    config = model.config.get_text_config(decoder=True)
    cache = NestedKVCache(config, tokens, 1, model.device)
    pads = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    forward = NestedForward(model, decoder.forward, cache, pads)
    columns = torch.arange(tokens, device=model.device)[None]
    with nested_attention_implementation(model):
        return milliseconds(
            lambda: forward("target", ids, columns, logits_to_keep=1), PREFILL_CALLS, model.device
        )
