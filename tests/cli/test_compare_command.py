"""``nestq compare`` and ``nestq ablate`` on a tiny checkpoint, and what they refuse."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from nestq import cli
from nestq.compare import ablation_command, command, options
from nestq.compare.contenders import CONTENDERS

SCHEMA = {
    "name": str,
    "weights": str,
    "kv": str,
    "context": int,
    "gamma": int,
    "weight_bytes": int,
    "cache_bytes": int,
    "step": dict,
    "draft": (dict, type(None)),
    "verification": (dict, type(None)),
    "skipped": (dict, type(None)),
    "perplexity": float,
    "scored_tokens": int,
    "acceptance": (str, type(None)),
    "slot_acceptance": (float, type(None)),
    "tokens_per_round": float,
    "acceptance_per_position": list,
    "new_tokens": int,
    "measured_peak_bytes": type(None),
    "speed": (dict, type(None)),
    "seconds": float,
    "first_position": (float, type(None)),
    "memory_bytes": int,
    "bytes_per_token": (int, float),
    "tokens_per_second": (float, type(None)),
    "expected_speedup": (float, type(None)),
    "speedup": (float, type(None)),
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a short run without ShareGPT."""
    text = tmp_path_factory.mktemp("texts") / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    sizes = "--contexts 40 --prompts 2 --new-tokens 6 --calibration none"
    return [*sizes.split(), "--texts", str(text)]


def test_a_run_that_was_stopped_goes_on(
    dense: str,
    nested: str,
    quick: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    line = ["compare", dense, *quick, "--gamma", "2", "--json", str(result)]
    line += ["--checkpoint", f"bitnest={nested}", "--recipes", "bitnest-kv8", "bitnest-kv4"]

    write_json = command.write_json

    def stop(path: Path, content: dict) -> None:
        write_json(path, content)
        if len(content["results"]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "write_json", stop)
    assert cli.main(line) == 130
    kept = json.loads(result.read_text(encoding="utf-8"))["results"]
    assert [entry["name"] for entry in kept] == ["16-bit", "bitnest-kv8"]

    monkeypatch.setattr(command, "write_json", write_json)
    capsys.readouterr()
    assert cli.main([*line, "--resume", "--plot", str(picture)]) == 0

    printed = capsys.readouterr()
    assert all(len(row) <= 80 for row in printed.out.splitlines())
    assert "…" not in printed.out
    for name in ("16-bit", "bitnest-kv8", "bitnest-kv4"):
        assert re.search(rf"^{name} .*\d", printed.out, re.M)
    assert "| 1/1 [" in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.json", "compare.png"]
    content = json.loads(result.read_text(encoding="utf-8"))
    assert content["command"].endswith(f"--resume --plot {picture}")
    assert content["versions"]["nestq"]
    assert content["settings"]["checkpoints"] == {"bitnest": nested}
    assert content["results"][:2] == kept
    assert [entry["name"] for entry in content["results"]] == [
        "16-bit",
        "bitnest-kv8",
        "bitnest-kv4",
    ]
    for entry in content["results"]:
        assert entry.keys() == SCHEMA.keys()
        for key, kind in SCHEMA.items():
            assert isinstance(entry[key], kind), key
        assert entry["scored_tokens"] == 2 * 39
        assert entry["expected_speedup"] == pytest.approx(
            kept[0]["bytes_per_token"] / entry["bytes_per_token"]
        )


def test_other_options_do_not_go_on(
    dense: str, quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "compare.json"
    line = ["compare", dense, *quick, "--recipes", "16-bit", "--json", str(result)]
    assert cli.main(line) == 0
    before = result.read_bytes()
    capsys.readouterr()

    assert cli.main([*line, "--resume", "--gamma", "2"]) == 2
    assert capsys.readouterr().err == (
        f"nestq compare: --resume {result}: it was made with gamma 4, got 2\n"
    )
    assert result.read_bytes() == before


def test_speed(
    dense: str, nested: str, quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "compare.json"
    recipes = ["bitnest-kv4", "quantspec-kv", "w8a8"]
    line = ["compare", dense, *quick, "--json", str(result), "--speed", "--rounds", "1"]

    assert cli.main([*line, "--checkpoint", f"bitnest={nested}", "--recipes", *recipes]) == 0

    assert "tokens/s" in capsys.readouterr().out
    entries = {e["name"]: e for e in json.loads(result.read_text(encoding="utf-8"))["results"]}
    assert entries["w8a8"]["speed"] is None, "torchao's own is not measured in this engine"
    for name in ("16-bit", "bitnest-kv4", "quantspec-kv"):
        entry = entries[name]
        assert entry["tokens_per_second"] == pytest.approx(
            1000 * entry["tokens_per_round"] / entry["speed"]["round_milliseconds"]
        )
        assert entry["speedup"] == pytest.approx(
            entry["tokens_per_second"] / entries["16-bit"]["tokens_per_second"]
        )
        assert (entry["speed"]["draft_milliseconds"] is None) == (name == "16-bit")


@pytest.mark.parametrize("kind", ["gamma", "draft-kv", "target-kv"])
def test_ablations_of_a_nested_checkpoint(
    nested: str,
    quick: list[str],
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = tmp_path / "ablation.json"

    line = ["ablate", nested, kind, *quick, "--gammas", "1", "3", "--json", str(result)]
    assert cli.main(line) == 0

    printed = capsys.readouterr().out
    assert all(len(row) <= 80 for row in printed.splitlines())
    assert "…" not in printed
    assert "GQA with 3 of 9 heads" in printed
    content = json.loads(result.read_text(encoding="utf-8"))
    table = {"gamma": 9, "draft-kv": 10, "target-kv": 11}[kind]
    assert (content["ablation"], content["paper"]) == (kind, f"BitNest, table {table}")
    names = [entry["name"] for entry in content["results"]]
    assert len(names) == {"gamma": 2, "draft-kv": 3, "target-kv": 6}[kind]
    assert all(name in printed for name in names)
    for entry in content["results"]:
        assert entry.keys() == SCHEMA.keys()
    if kind == "target-kv":
        assert "ppl" in printed
        by_name = {entry["name"]: entry for entry in content["results"]}
        same = by_name["AR KV8"], by_name["draft KV4, target KV8"]
        assert same[0]["perplexity"] == same[1]["perplexity"]
        assert by_name["AR KV4"]["perplexity"] != by_name["AR KV8"]["perplexity"]


def test_a_16_bit_model_is_nested_first(
    dense: str, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ablate", dense, "gamma", "--gammas", "1", *quick]) == 0
    printed = capsys.readouterr()
    assert "round: 100%" in printed.err
    assert "gamma 1" in printed.out


WRONG = {
    "recipe": ("compare DENSE --recipes bitnet", "--recipes must be of 16-bit, w8a8"),
    "gamma": ("compare DENSE --gamma 17", "gamma must be an int from 0 to 16, got 17"),
    "no gamma": ("compare DENSE --gamma 0", "argument --gamma: expected a whole number >= 1"),
    "context": ("compare DENSE --contexts 31 --recipes w8a8", "at least 32 tokens each, got 31"),
    "sparse context": (
        "compare DENSE --contexts 100",
        "--contexts 100: too short for bitnest-snap",
    ),
    "device": ("compare DENSE --device meta", "device 'meta' cannot be used"),
    "json": ("compare DENSE --json no/such/x.json", "--json no/such/x.json: there is no folder"),
    "plot": ("compare DENSE --plot x.abc", "--plot x.abc: the name must end in one of"),
    "resume": ("compare DENSE --resume", "--resume needs --json"),
    "texts": ("compare DENSE --texts gone.txt", "gone.txt"),
    "calibration": ("compare DENSE --calibration x.csv", "x.csv"),
    "no calibration": (
        "compare DENSE --calibration none --recipes draft-and-verify",
        "--calibration none: draft-and-verify searches for layers",
    ),
    "checkpoint": ("compare DENSE --checkpoint x", "must be NAME=FOLDER with a NAME of w4a8, "),
    "checkpoint name": ("compare DENSE --checkpoint 16-bit=NESTED", "got '16-bit=NESTED'"),
    "no checkpoint": ("compare DENSE --checkpoint bitnest=gone", "gone: neither a folder nor"),
    "dense checkpoint": ("compare DENSE --checkpoint bitnest=DENSE", "not a nestq checkpoint"),
    "quantized": ("compare NESTED", "NESTED: the model is quantized already, expected one of 16"),
    "no model": ("compare no-such-model", "no-such-model: neither a folder nor a model to fetch"),
    "shape": ("compare llama-3-8b", "--speed is needed with llama-3-8b"),
    "shape that skips": (
        "compare llama-3-8b --speed --recipes draft-and-verify",
        "draft-and-verify cannot be timed with random weights",
    ),
    "synthetic": ("compare DENSE --synthetic-acceptance 0.9", "is for random weights, and DENSE"),
    "ablation": ("ablate NESTED speed", "invalid choice: 'speed'"),
    "ablated gammas": ("ablate NESTED gamma --gammas 4 20", "from 0 to 16, got 20"),
    "ablated model": ("ablate no-such-model gamma", "no-such-model: neither a folder nor"),
}


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_before_a_model_is_loaded(
    dense: str,
    nested: str,
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (command, ablation_command):
        monkeypatch.setattr(module, "subject_of", lambda *_: pytest.fail("a model was loaded"))

    def resolve(text: str) -> str:
        return text.replace("DENSE", dense).replace("NESTED", nested)

    capsys.readouterr()
    try:
        code = cli.main(resolve(line).split())
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith(f"nestq {line.split()[0]}: ")
    assert resolve(message) in printed.err


def test_a_context_that_the_model_has_not(
    dense: str, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["compare", dense, *quick, "--contexts", "4096", "--recipes", "w8a8"]
    assert cli.main(line) == 2
    assert "is 2048; lower" in capsys.readouterr().err.splitlines()[-1]


def test_a_checkpoint_of_another_model(
    dense: str,
    nested: str,
    quick: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    shutil.copytree(nested, other)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = 5
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    line = ["compare", dense, *quick, "--recipes", "bitnest-kv8"]

    assert cli.main([*line, "--checkpoint", f"bitnest={other}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--checkpoint {other}: a model with vocab_size 5, expected 49152" in error


def test_all_recipes_are_listed_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    printed = re.sub(r"-?\s+", "", capsys.readouterr().out)
    for name in CONTENDERS:
        assert name.replace("-", "") in printed.replace("-", "")


def test_a_shape_with_random_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All recipes that need no text, on a tiny model in place of the named one."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    monkeypatch.setattr(options, "shape_config", lambda _: config)
    result, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    line = "compare llama-3-8b --speed --synthetic-acceptance 0.9 --rounds 1 --contexts 160"

    assert cli.main([*line.split(), "--json", str(result), "--plot", str(picture)]) == 0

    printed = capsys.readouterr().out
    assert all(len(row) <= 80 for row in printed.splitlines())
    assert "synthetic" in printed
    entries = json.loads(result.read_text(encoding="utf-8"))["results"]
    assert {entry["name"] for entry in entries} == set(CONTENDERS) - {
        "w8a8",
        "draft-and-verify",
        "bitnest-skipping",
    }
    for entry in entries:
        assert entry["perplexity"] is None
        assert entry["acceptance"] == ("synthetic" if entry["gamma"] else None)
        assert entry["tokens_per_round"] == pytest.approx(4.6 if entry["gamma"] else 1)
        assert entry["tokens_per_second"] > 0
