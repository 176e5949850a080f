"""What is computed of results, their JSON, and going on with a file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nestq.compare.contenders import CONTENDERS
from nestq.compare.results import BytesRead, Result, Results, Speed, left_behind

SETTINGS = {"model": "some", "gamma": 4, "checkpoints": {}, "texts": None}


def reference(**changes: object) -> Result:
    made = Result("16-bit", "16-bit", "16/16", 100, 0, 1000, 200, BytesRead(1000, 100))
    return replace(made, tokens_per_round=1.0, **changes)


def drafting(**changes: object) -> Result:
    made = replace(
        reference(),
        name="bitnest-kv4",
        weights="bitnest",
        kv="kv4/kv8",
        gamma=4,
        step=BytesRead(500, 50),
        draft=BytesRead(250, 30),
        verification=BytesRead(500, 60),
        acceptance="measured",
        slot_acceptance=0.75,
        tokens_per_round=4.0,
        acceptance_per_position=[0.9, 0.8, 0.7, 0.6],
    )
    return replace(made, **changes)


def test_bytes_of_a_token_and_what_follows() -> None:
    results = Results({}, SETTINGS, [reference(), drafting()])
    first, second = results.results
    assert second.bytes_per_token == (4 * 280 + 560) / 4
    assert results.expected_speedup(second) == 1100 / 420
    assert results.expected_speedup(first) == 1
    assert second.first_position == 0.9
    assert first.first_position is None
    assert second.memory_bytes == 1200
    assert results.speedup(second) is None


def test_speed_is_compared_at_the_same_context() -> None:
    slow = reference(speed=Speed(20.0, None, None, None))
    fast = drafting(speed=Speed(40.0, 5.0, 15.0, 77))
    other = reference(context=200, speed=Speed(80.0, None, None, None))
    results = Results({}, SETTINGS, [other, slow, fast])
    assert slow.tokens_per_second == 50
    assert fast.tokens_per_second == 100
    assert results.speedup(fast) == 2
    assert results.speedup(other) == 1
    assert results.expected_speedup(drafting(context=300)) is None
    assert drafting(tokens_per_round=None, speed=fast.speed).tokens_per_second is None


def test_a_file_gives_the_results_back(tmp_path: Path) -> None:
    some = [reference(perplexity=9.5, scored_tokens=99), drafting(speed=Speed(1.0, 2.0, 3.0, 4))]
    some.append(drafting(name="draft-and-verify", skipped={"attention": [1], "mlp": []}))
    path = tmp_path / "results.json"
    content = Results({"command": "nestq compare"}, SETTINGS, some).to_dict()
    path.write_text(json.dumps(content), encoding="utf-8")

    assert left_behind(path, SETTINGS) == some
    assert content["command"] == "nestq compare"
    assert content["results"][1]["expected_speedup"] == 1100 / 420
    assert left_behind(tmp_path / "none.json", SETTINGS) == []


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(Results({}, SETTINGS, [reference()]).to_dict()), encoding="utf-8")
    with pytest.raises(ValueError, match=r"made with gamma 4, got 5"):
        left_behind(path, SETTINGS | {"gamma": 5})
    for text in ("no JSON", "{}", '{"settings": {}, "results": [{"name": "x"}]}', "[]"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="not the results of such a run"):
            left_behind(path, SETTINGS)


def test_what_is_there_is_known_by_name_and_context() -> None:
    results = Results({}, SETTINGS, [reference(), drafting(context=200)])
    assert results.has("16-bit", 100)
    assert not results.has("16-bit", 200)
    assert results.at(200) == [drafting(context=200)]
    assert set(CONTENDERS) >= {one.name for one in results.results}
