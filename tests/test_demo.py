"""``nestq demo`` on a tiny random model."""

import contextlib
import copy
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import small_models
import tiny_checkpoint
from nested_models import nest_
from rich.console import Console

from nestq import demo
from nestq.checkpoint import read_config

NEW = 10


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    tiny_checkpoint.save_dense(folder)
    return folder


class Runs(NamedTuple):
    """What two runs printed, whether the second left the checkpoint alone, and their answers."""

    folder: Path
    first: str
    second: str
    reused: bool
    answer: str


def modification_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def printed_by(folder: Path) -> str:
    stream = io.StringIO()
    demo.run_demo(folder, "Why is the sky blue?", NEW, Console(file=stream, width=80))
    return stream.getvalue()


def value(printed: str, row: str) -> str:
    """The last column of a row of a table."""
    match = re.search(rf"^│ {re.escape(row)} +│ +(.*?) +│$", printed, re.M)
    assert match is not None, f"no row {row!r} in\n{printed}"
    return match[1]


@pytest.fixture(scope="module")
def runs(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("demo") / "checkpoints" / "demo"
    answer = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(answer):
        patch.setattr(demo, "MODEL", str(dense))
        patch.setattr(demo, "CALIBRATION_TOKENS", 300)
        patch.setattr(demo, "HELDOUT_TOKENS", 200)
        first = printed_by(folder)
        made = modification_times(folder)
        second = printed_by(folder)
    return Runs(folder, first, second, modification_times(folder) == made, answer.getvalue())


def test_the_first_run_makes_the_checkpoint_and_the_second_reuses_it(runs: Runs) -> None:
    config = read_config(runs.folder)
    assert config.report is not None
    assert config.report["calibration_tokens"] == 300
    assert "300 calibration tokens" in runs.first
    assert "calibration tokens" not in runs.second
    assert runs.reused
    for row in ("slot acceptance", "draft (W4A8, KV8)", "bfloat16 (dequantized Q4_1)"):
        assert value(runs.second, row) == value(runs.first, row)


def test_the_answer_is_streamed(runs: Runs) -> None:
    half = len(runs.answer) // 2
    assert len(set(runs.answer)) > NEW
    assert runs.answer[:half] == runs.answer[half:], "two runs give one answer"


def test_the_tables_hold_what_the_demo_promises(runs: Runs) -> None:
    printed = runs.first
    assert all(len(line) <= 80 for line in printed.splitlines() if "loading" not in line)

    mib = {
        row: float(value(printed, row))
        for row in (
            "bfloat16 linears and head",
            "base plane (draft)",
            "refinement plane",
            "scales",
            "embedding, bfloat16 in both",
        )
    }
    # The head is most of it: 49152 x 144, and K = 144 is padded to 192.
    assert mib["bfloat16 linears and head"] == pytest.approx(49152 * 144 * 2 / 2**20, rel=0.1)
    assert mib["base plane (draft)"] == pytest.approx(49152 * 192 / 2 / 2**20, rel=0.1)
    assert mib["embedding, bfloat16 in both"] == pytest.approx(49152 * 144 * 2 / 2**20, abs=0.1)
    assert mib["base plane (draft)"] == mib["refinement plane"]
    total = 2 * mib["base plane (draft)"] + mib["scales"]
    assert float(value(printed, "nested in all")) == pytest.approx(total, abs=0.2)

    acceptance = float(value(printed, "slot acceptance"))
    positions = [float(share) for share in value(printed, "acceptance per position").split()]
    assert len(positions) == 4
    assert sum(positions) / 4 == pytest.approx(acceptance, abs=0.01)
    per_round = float(value(printed, "tokens per round"))
    assert per_round == pytest.approx(1 + 4 * acceptance, abs=0.01)
    assert value(printed, "output equals target-only decoding") == "yes"

    for path in ("bfloat16 (transformers generate)", "target only", "speculative"):
        assert float(value(printed, f"{path}, tokens/s")) > 0
    for model in ("bfloat16 (dequantized Q4_1)", "draft (W4A8, KV8)", "target (W8A8, KV8)"):
        assert float(value(printed, model)) > 1


def test_bytes_of_a_float32_model_are_counted_as_such() -> None:
    reference = small_models.build("llama-gqa", vocab_size=50_000)
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(demo._bytes_table(nest_(copy.deepcopy(reference)), reference))

    mib = 50_000 * 48 * 4 / 2**20
    printed = capture.get()
    assert float(value(printed, "embedding, float32 in both")) == pytest.approx(mib, abs=0.1)
    assert float(value(printed, "float32 linears and head")) > mib


def test_a_folder_that_is_not_ours_is_refused(dense: Path) -> None:
    with pytest.raises(ValueError, match="not a nestq checkpoint"):
        printed_by(dense)
