"""What the command ``nestq`` refuses: one clear line and exit code 2, no traceback."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nestq import cli
from nestq.gptq import CalibrationError


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


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
    "gamma that is none": ("generate NESTED hi --gamma automatic", "got 'automatic'"),
    "gamma below 0": ("generate NESTED hi --gamma -1", ">= 0, got '-1'"),
    "overlap": ("quantize DENSE --out OUT --calibration none --overlap 17", "16, got 17"),
    "group size": ("quantize DENSE --out OUT --group-size 48", "48"),
    "tokens 0": ("quantize DENSE --out OUT --tokens 0", ">= 1, got '0'"),
    "tokens that are none": ("quantize DENSE --out OUT --tokens many", "got 'many'"),
    "new tokens": ("generate NESTED hi --max-new-tokens 0", ">= 1, got '0'"),
    "temperature": ("generate NESTED hi --temperature 0", "a number above 0, got '0'"),
    "temperature that is none": ("generate NESTED hi --temperature hot", "above 0, got 'hot'"),
    "infinite temperature": ("generate NESTED hi --temperature inf", "above 0, got 'inf'"),
    "top p": ("generate NESTED hi --top-p 1.5", "a number above 0, at most 1, got '1.5'"),
    "top k": ("generate NESTED hi --top-k 0", ">= 1, got '0'"),
    "seed of a sample": ("generate NESTED hi --seed -3", ">= 0, got '-3'"),
    "seed of a sample that is too large": (
        "generate NESTED hi --seed 18446744073709551616",
        "seed must be an int from 0 to 18446744073709551615",
    ),
    "seed": ("quantize DENSE --out OUT --seed -3", ">= 0, got '-3'"),
    "foreign out": ("quantize DENSE --out FOREIGN --calibration none", "not ours"),
    "out is a file": ("quantize DENSE --out FOREIGN/note --calibration none", "is a file"),
    "missing calibration": ("quantize DENSE --out OUT --calibration GONE.txt", "GONE.txt"),
    "calibration format": ("quantize DENSE --out OUT --calibration x.csv", "x.csv"),
    "tuning": ("quantize DENSE --out OUT --calibration none --tuning-steps 2", "--tuning-steps"),
    "tune codes": ("quantize DENSE --out OUT --tune-codes", "tune_codes"),
    "device": ("quantize DENSE --out OUT --calibration none --device warp", "'warp'"),
    "device of eval": ("eval NESTED --reference DENSE --device warp", "'warp'"),
    "json into a folder": ("eval NESTED --reference DENSE --json FOREIGN", "FOREIGN: a folder"),
    "out where nothing can be": (
        "quantize GONE --out FOREIGN/note/x/out",
        "FOREIGN/note: nothing can be written here",
    ),
    "demo where nothing can be": (
        "demo --folder FOREIGN/note/x",
        "FOREIGN/note: nothing can be written here",
    ),
    "demo into a file": ("demo --folder FOREIGN/note", "note: a file, expected the folder"),
    "inspect a file": ("inspect FOREIGN/note", "FOREIGN/note: a file, expected the folder"),
    "generate from the packaged model": (
        "generate smollm2-135m hi",
        "smollm2-135m: the model is not nested; `nestq quantize smollm2-135m --out FOLDER` nests",
    ),
    "eval of a GGUF file": ("eval x.gguf --reference DENSE", "x.gguf: the model is not nested"),
    "seed that is too large": (
        "quantize DENSE --out OUT --seed 18446744073709551616",
        "seed must be an int from 0 to 18446744073709551615",
    ),
    "meta device": ("eval NESTED --reference DENSE --device meta", "'meta' cannot be used"),
    "device of generate": ("generate NESTED hi --device meta", "'meta' cannot be used"),
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


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_json_where_nothing_can_be_written(
    dense: str, nested: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "load_model", lambda *_: pytest.fail("a model was loaded"))

    assert cli.main(["eval", nested, "--reference", dense, "--json", "/proc/x.json"]) == 2
    error = capsys.readouterr().err
    assert error == "nestq eval: /proc: nothing can be written here: No such file or directory\n"


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
    monkeypatch.chdir(tmp_path)  # a long path could be broken anywhere
    out = "out[v1] [/0] :smile:"
    assert cli.main(["quantize", dense, "--out", out, "--calibration", "none"]) == 0
    assert f"saved {out}\n" in capsys.readouterr().out

    assert cli.main(["inspect", out]) == 0
    assert out in " ".join(capsys.readouterr().out.split()), "in a title of several lines"


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
