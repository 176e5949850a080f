import json
import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestq.speculative.metrics import DecodingMetrics, Stopwatch


def metrics(accepted_per_position: list[int], rounds: int, tokens: int = 30) -> DecodingMetrics:
    return DecodingMetrics(
        gamma=len(accepted_per_position),
        batch=2,
        rounds=rounds,
        verifications=7,
        accepted_per_position=accepted_per_position,
        tokens=tokens,
        prefill_seconds=0.5,
        draft_seconds=2.0,
        verification_seconds=1.0,
        total_seconds=4.0,
    )


def test_rates() -> None:
    result = metrics([8, 6, 3, 1], rounds=10)
    assert result.drafted == 40
    assert result.accepted == 18
    assert result.slot_acceptance == 18 / 40
    assert result.tokens_per_round == 2.8
    assert result.acceptance_per_position == [0.8, 0.6, 0.3, 0.1]
    assert result.tokens_per_second == 7.5


@given(rounds=st.integers(1, 1000), data=st.data())
def test_positions_average_to_slot_acceptance(rounds: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, rounds), min_size=1, max_size=16))
    result = metrics(sorted(counts, reverse=True), rounds)
    assert result.slot_acceptance is not None
    assert math.isclose(
        sum(result.acceptance_per_position) / result.gamma, result.slot_acceptance, abs_tol=1e-12
    )
    assert result.tokens_per_round == pytest.approx(1 + result.gamma * result.slot_acceptance)


def test_nothing_drafted() -> None:
    result = metrics([], rounds=10)
    assert result.slot_acceptance is None
    assert result.tokens_per_round == 1
    assert result.acceptance_per_position == []
    assert "slot acceptance   -" in result.summary()
    assert metrics([0], rounds=0, tokens=0).tokens_per_round is None


def test_rounds_with_different_numbers_of_draft_tokens() -> None:
    result = replace(metrics([7, 5, 1, 0], 10), gamma="auto", drafted_per_position=[9, 6, 2, 0])
    assert result.rounds_per_gamma == {0: 1, 1: 3, 2: 4, 3: 2}
    assert (result.drafted, result.accepted) == (17, 13)
    assert result.slot_acceptance == 13 / 17
    assert result.acceptance_per_position == [7 / 9, 5 / 6, 1 / 2]
    assert result.tokens_per_round == 2.3
    line = "auto; draft tokens in rounds: 0 in 1, 1 in 3, 2 in 4, 3 in 2"
    assert result.summary().splitlines()[0].endswith(line)
    looked_up = replace(result, lookups=3).summary().splitlines()[0]
    assert looked_up.endswith(line + "; looked up for 3 verification(s)")
    assert json.loads(json.dumps(result.to_dict()))["rounds_per_gamma"]["2"] == 4
    same = metrics([8, 6], 10)
    assert same.rounds_per_gamma == {2: 10}
    assert replace(same, drafted_per_position=[10, 10]).summary() == same.summary()


def test_the_total_of_calls_has_the_rates_of_all_rounds() -> None:
    first = replace(metrics([8, 6], 10, tokens=20), lookups=2, host_seconds=0.25)
    second = replace(metrics([3, 1], 30, tokens=12), drafted_per_position=[20, 5])
    total = DecodingMetrics.total([first, second])
    assert (total.gamma, total.batch, total.rounds, total.verifications) == (2, 4, 40, 14)
    assert total.accepted_per_position == [11, 7]
    assert total.drafts == [30, 15]
    assert (total.lookups, total.tokens) == (2, 32)
    assert total.acceptance_per_position == [11 / 30, 7 / 15]
    assert total.tokens_per_round == 1 + 18 / 40
    assert (total.prefill_seconds, total.draft_seconds) == (1.0, 4.0)
    assert (total.verification_seconds, total.host_seconds) == (2.0, 0.25)
    assert total.tokens_per_second == 32 / 8
    assert DecodingMetrics.total([first]).to_dict() == {
        **first.to_dict(),
        "drafted_per_position": [10, 10],
    }


def test_the_total_of_calls_of_different_kinds() -> None:
    graph = replace(metrics([5], 10), in_graph=True, draft_seconds=None, verification_seconds=None)
    total = DecodingMetrics.total([metrics([8, 6, 1], 10), graph])
    assert total.gamma is None
    assert total.accepted_per_position == [13, 6, 1]
    assert total.drafts == [20, 10, 10]
    assert total.in_graph
    assert (total.draft_seconds, total.verification_seconds) == (None, None)
    assert "several; draft tokens in rounds: 1 in 10, 3 in 10" in total.summary()
    assert "CUDA graphs" in total.summary()
    with pytest.raises(ValueError, match="results must hold the metrics of at least one call"):
        DecodingMetrics.total([])


def test_json_holds_counts_and_rates() -> None:
    result = metrics([8, 6], rounds=10)
    values = json.loads(json.dumps(result.to_dict()))
    assert values["accepted"] == 14
    assert values["accepted_per_position"] == [8, 6]
    assert values["slot_acceptance"] == 0.7
    assert values["draft_seconds"] == 2.0
    fields = {name: values[name] for name in DecodingMetrics.__dataclass_fields__}
    assert DecodingMetrics(**fields) == result


def test_summary_has_units() -> None:
    lines = metrics([8, 6], rounds=10).summary().splitlines()
    summary = dict(line.strip().split("  ", 1) for line in lines)
    summary = {name: value.strip() for name, value in summary.items()}
    assert summary["speed"] == "7.50 tokens/s"
    assert summary["tokens per round"] == "2.400"
    assert summary["slot acceptance"] == "0.700"
    assert summary["per position"] == "0.800 0.600"
    assert summary["accepted"] == "14 of 20 draft tokens"
    assert summary["draft"] == "2.000 s"
    assert summary["host"] == "0.000 s"
    assert summary["other"] == "0.500 s"
    assert len({len(line) - len(line.split("  ")[-1].strip()) for line in lines}) == 1


def test_stopwatch_adds_up_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 2.0, 4.0, 5.0, 5.25, 6.0, 6.5, 7.0, 7.25, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    for phase in ("prefill", "draft", "draft"):
        with watch(phase):
            pass
    for _ in range(2):
        with watch.on_host():
            pass
    assert watch.seconds() == {
        "prefill_seconds": 0.5,
        "draft_seconds": 2.25,
        "verification_seconds": 0.0,
        "host_seconds": 0.75,
        "total_seconds": 10.0,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stopwatch_reads_the_clock_of_the_gpu() -> None:
    device = torch.device("cuda")
    watch = Stopwatch(device)
    with watch("draft"):
        torch.cuda._sleep(10_000_000)
    seconds = watch.seconds()
    assert 0 < seconds["draft_seconds"] <= seconds["total_seconds"]
    assert seconds["prefill_seconds"] == 0
