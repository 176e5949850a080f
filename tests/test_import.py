"""What ``import nestq`` needs, does and offers."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import nestq

ROOT = Path(__file__).resolve().parents[1]

IMPORT_WITHOUT_TRITON = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import nestq
import torch

assert not torch.cuda.is_initialized()
assert "triton" not in sys.modules
for name in nestq.__all__:
    getattr(nestq, name)
"""


IMPORT_AND_LOG = """
import logging

logging.getLogger("torchao").setLevel(logging.INFO)
import nestq

assert logging.getLogger("torchao").level == logging.INFO
assert logging.getLogger("torch.utils._pytree").level == logging.NOTSET
"""


def test_import_needs_no_triton_and_no_gpu() -> None:
    command = [sys.executable, "-c", IMPORT_WITHOUT_TRITON]
    # The folder beside the sources is not the current one: the installed package is imported.
    result = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_import_is_silent_and_leaves_the_levels_of_loggers_alone() -> None:
    command = [sys.executable, "-c", IMPORT_AND_LOG]
    result = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torchao" not in result.stderr
    assert result.stdout == ""


def test_public_names_are_all_there_is() -> None:
    public = {
        name
        for name, value in vars(nestq).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(nestq.__all__)
    assert len(nestq.__all__) == len(public)  # in the order of ruff's RUF022


@pytest.mark.parametrize("name", nestq.__all__)
def test_public_names_are_documented(name: str) -> None:
    own = getattr(nestq, name).__doc__
    assert own
    # dataclasses write their signature where nothing was written.
    assert not own.startswith(f"{name}(")


@pytest.mark.parametrize("folder", ["kernels", "passes"])
def test_fast_code_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "nestq" / folder
    assert link.is_symlink()
    assert not os.path.isabs(os.readlink(link))
    assert link.resolve() == ROOT / folder
    assert link.is_dir()
