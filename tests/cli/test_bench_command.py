"""``nestq bench`` on a tiny checkpoint and on what cannot be measured."""

import json
import re
from pathlib import Path

import pytest

from nestq import cli
from nestq.bench import command

QUICK = ["--contexts", "16", "--gammas", "2", "--rounds", "2", "--prefill-tokens", "8"]


def test_synthetic_acceptance_on_a_checkpoint(
    nested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    arguments = ["bench", nested, *QUICK, "--synthetic-acceptance", "0.9"]

    assert cli.main([*arguments, "--json", str(result), "--plot", str(picture)]) == 0

    printed = capsys.readouterr()
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert "…" not in printed.out
    for header in ("16-bit", "W8A8", "token", "GB", "of floor"):
        assert re.search(rf"{header} *$", printed.out, re.M) or f" {header} " in printed.out
    assert printed.out.count("synthetic") == 2
    assert "bench: 100%" in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed.json", "speed.png"]
    content = json.loads(result.read_text(encoding="utf-8"))
    assert content["command"].startswith("nestq bench ")
    assert content["device"]["type"] == "cpu"
    assert content["compiler"] == "none"
    assert content["energy"] == "the device is no GPU"
    entries = content["measurements"]
    assert [(entry["system"], entry["kv"]) for entry in entries] == [
        ("16-bit", None),
        ("w8a8", None),
        ("w4a8", "kv8/kv8"),
        ("w4a8", "kv4/kv8"),
        ("speculative", "kv8/kv8"),
        ("speculative", "kv4/kv8"),
    ]
    assert [entry["acceptance"] for entry in entries[:4]] == [None] * 4
    for entry in entries[4:]:
        assert entry["acceptance"]["kind"] == "synthetic"
        assert entry["acceptance"]["slot"] == 0.9
        assert entry["acceptance"]["per_token"] == pytest.approx(0.9318, abs=1e-4)
        assert 0 <= entry["acceptance"]["drawn_slot"] <= 1
        assert entry["tokens_per_round"] == pytest.approx(2.8)
        assert entry["speedup_over_w8a8"] == pytest.approx(
            entry["tokens_per_second"] / entries[1]["tokens_per_second"]
        )
    assert [entry["system"] for entry in content["prefills"]] == ["w8a8", "16-bit"]


def test_a_compiled_model(nested: str, tmp_path: Path) -> None:
    result = tmp_path / "speed.json"
    arguments = ["bench", nested, "--systems", "w8a8", "--contexts", "16", "--rounds", "2"]

    assert (
        cli.main(
            [*arguments, "--prefill-tokens", "0", "--compiler", "inductor", "--json", str(result)]
        )
        == 0
    )

    content = json.loads(result.read_text(encoding="utf-8"))
    assert content["compiler"] == "inductor"
    assert [entry["system"] for entry in content["measurements"]] == ["w8a8"]
    assert content["prefills"] == []


def test_a_checkpoint_answers_prompts(
    nested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestq.bench.runner.prompts_to_answer", lambda *_: [[5, 6, 7], [8, 9]])
    result = tmp_path / "speed.json"
    arguments = ["bench", nested, *QUICK, "--systems", "speculative", "--kv", "kv4/kv8"]

    assert cli.main([*arguments, "--new-tokens", "256", "--json", str(result)]) == 0

    (entry,) = json.loads(result.read_text(encoding="utf-8"))["measurements"]
    assert entry["acceptance"]["kind"] == "measured"
    # Prompts of 2.5 tokens on average, and half of 128 new ones; it does not say it is at 8.
    assert 3 <= entry["acceptance"]["context"] <= 67
    assert entry["acceptance"]["label"].endswith(f"at {entry['acceptance']['context']} tokens")
    assert entry["tokens_per_round"] == pytest.approx(1 + 2 * entry["acceptance"]["slot"])
    assert entry["tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert "Acceptance was measured in answers to prompts" in " ".join(printed.split())
    assert "synthetic" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no-such-model: neither a folder nor a model to fetch"),
        (["smollm2-135m", "--gammas", "17"], "gamma must be an int from 0 to 16, got 17"),
        (["smollm2-135m", "--kv", "kv2"], "the KV policy must be"),
        (["smollm2-135m", "--device", "meta"], "device 'meta' cannot be used"),
        (["smollm2-135m", "--json", "no/such/x.json"], "--json no/such/x.json: there is no folder"),
        (["smollm2-135m", "--plot", "speed.abc"], "--plot speed.abc: the name must end in one of"),
    ],
)
def test_wrong_input_is_refused_before_work(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "measure_source", lambda *_: pytest.fail("a model was measured"))
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "1.5", "much"])
def test_a_share_of_draft_tokens_is_between_0_and_1(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "smollm2-135m", "--synthetic-acceptance", value])
    assert "--synthetic-acceptance: expected a number above 0" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestq.bench.plot.find_spec", lambda _: None)
    assert cli.main(["bench", "smollm2-135m", "--plot", "speed.png"]) == 2
    assert "pip install 'nestq[dev]'" in capsys.readouterr().err
