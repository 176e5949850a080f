"""What is measured of a small model on a CPU: every system runs, and numbers fit together."""

import math
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import nested_model
from transformers import PreTrainedModel

from nestq.bench.acceptance import Acceptance
from nestq.bench.energy import EnergyMeter
from nestq.bench.measure import Case, Decoder, Measurement, cases, measure, measure_prefill
from nestq.bench.timing import bandwidth, captured, milliseconds
from nestq.view import current_view

CPU = torch.device("cpu")
ROUNDS = 4


class Recorder:
    """Calls a model, and notes the view and the positions of each call."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.calls: list[tuple[str, list[int]]] = []

    def __call__(self, **inputs: Any) -> Any:
        self.calls.append((current_view(), inputs["position_ids"][0].tolist()))
        return self.model(**inputs)


def measured(
    case: Case, acceptance: Acceptance | None = None
) -> tuple[Measurement, list[tuple[str, list[int]]]]:
    if case.system == "16-bit":
        model = small_models.build("llama-gqa", dtype=torch.bfloat16)
    else:
        model = nested_model(dtype=torch.bfloat16)
    recorder = Recorder(model)
    decoder = Decoder("small", "random", model, recorder)
    return measure(decoder, case, acceptance, ROUNDS, EnergyMeter(CPU)), recorder.calls


def test_cases_are_measured_once() -> None:
    found = cases(
        ["16-bit", "w8a8", "w4a8", "speculative"], [8, 9, 8], [1], [2, 4], ["kv8/kv8", "kv4/kv8"]
    )
    assert len(found) == len(set(found)) == 2 * (1 + 1 + 2 + 4)
    assert [case for case in found if case.context == 8][:4] == [
        Case("16-bit", 8, 1),
        Case("w8a8", 8, 1),
        Case("w4a8", 8, 1, 0, "kv8/kv8"),
        Case("w4a8", 8, 1, 0, "kv4/kv8"),
    ]


@pytest.mark.parametrize(
    ("system", "view"), [("16-bit", "target"), ("w8a8", "target"), ("w4a8", "draft")]
)
def test_a_system_that_does_not_draft(system: Any, view: str) -> None:
    result, calls = measured(Case(system, 20, 2, 0, "kv4/kv8" if view == "draft" else None))
    # Each call is at the context, and one is to warm up.
    assert calls == [(view, [20])] * (ROUNDS + 1)
    assert result.tokens_per_round == 1
    assert result.tokens_per_second == pytest.approx(2 * 1000 / result.round.milliseconds)
    assert list(result.steps()) == ["step"]
    assert result.peak_bytes is None
    assert result.joules_per_token is None


def test_speculative_rounds() -> None:
    acceptance = Acceptance.synthetic(0.9, 3)
    result, calls = measured(Case("speculative", 20, 2, 3, "kv4/kv8"), acceptance)
    one_round = [("draft", [20]), ("draft", [21]), ("draft", [22]), ("target", [20, 21, 22, 23])]
    expected = one_round * (ROUNDS + 1)
    expected += one_round[:1] * (ROUNDS + 1) + one_round[-1:] * (ROUNDS + 1)
    assert calls == expected
    assert result.tokens_per_round == pytest.approx(1 + 3 * 0.9)
    assert result.tokens_per_second == pytest.approx(2 * 3.7 * 1000 / result.round.milliseconds)
    assert list(result.steps()) == ["draft step", "verification", "round"]
    assert result.draft is not None
    assert result.verification is not None
    assert result.round.bytes_read == 3 * result.draft.bytes_read + result.verification.bytes_read
    step = result.verification
    assert step.terabytes_per_second == pytest.approx(step.bytes_read / step.milliseconds / 1e9)
    assert step.floor(2.0) == pytest.approx(step.bytes_read / 2e9)


def test_the_drawn_acceptance_is_reported() -> None:
    torch.manual_seed(0)
    batch, slot = 256, 0.8
    case = Case("speculative", 8, batch, 2, "kv8/kv8")
    result, _ = measured(case, Acceptance.synthetic(slot, 2))
    # Hoeffding, for row-rounds whose acceptance lies in [0, 1].
    bound = math.sqrt(math.log(2 / 1e-6) / (2 * batch * (ROUNDS + 1)))
    assert result.drawn_slot_acceptance == pytest.approx(slot, abs=bound)


def test_unknown_acceptance_gives_no_tokens_a_second() -> None:
    result, _ = measured(Case("speculative", 20, 1, 2, "kv8/kv8"))
    assert result.tokens_per_second is None
    assert result.drawn_slot_acceptance is None
    assert result.round.milliseconds > 0


def test_prefill_of_both_kinds_of_models() -> None:
    dense, nested = small_models.build("llama-gqa"), nested_model()
    views = []

    def forward(**inputs: Any) -> Any:
        views.append((current_view(), inputs["input_ids"].shape[1]))
        return nested(**inputs)

    assert measure_prefill(Decoder("small", "random", dense, dense), 30) > 0
    assert measure_prefill(Decoder("small", "random", nested, forward), 30) > 0
    assert set(views) == {("target", 30)}


def test_timing_on_a_cpu() -> None:
    calls = []
    call = captured(lambda: calls.append(1), CPU)
    assert milliseconds(call, 5, CPU) < 100
    assert len(calls) == 6
    terabytes, origin = bandwidth(CPU)
    assert 0 < terabytes < 10
    assert origin == "measured by a copy"
    assert EnergyMeter(CPU).obstacle == "the device is no GPU"
