"""Examples compile; that they run as they stand takes minutes."""

import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def test_the_examples_are_found() -> None:
    assert {path.stem for path in EXAMPLES} >= {"quickstart", "generate_with_transformers"}


@each_example
def test_it_compiles_and_says_how_to_run_it(path: Path, tmp_path: Path) -> None:
    py_compile.compile(str(path), cfile=str(tmp_path / "compiled"), doraise=True)
    assert f"python examples/{path.name}" in path.read_text(encoding="utf-8")


@pytest.mark.full
@each_example
def test_it_runs(path: Path, tmp_path: Path) -> None:
    """In an empty folder, where it may leave a checkpoint."""
    result = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 5
