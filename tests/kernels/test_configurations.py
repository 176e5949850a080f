"""A configuration comes from a file, and is measured only where no file knows it."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nestq.kernels import configurations


class Config(NamedTuple):
    warps: int
    tiles: int


CANDIDATES = [Config(1, 1), Config(2, 1), Config(4, 2)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    """A GPU in name, with measured times that are best for the second candidate."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(configurations, "FAMILY_FILES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(configurations, "do_bench", lambda run, **_: run())
    configurations._known.cache_clear()
    return torch.device("cuda")


def seconds(config: Config) -> float:
    return abs(config.warps - 2)


def never(config: Config) -> float:
    raise AssertionError("measured again")


def test_a_cpu_takes_the_first_guess() -> None:
    chosen = configurations.choose("kernel", "shape", CANDIDATES, never, torch.device("cpu"))
    assert chosen == CANDIDATES[0]


def test_the_fastest_is_measured_once_and_kept(gpu: torch.device, tmp_path: Path) -> None:
    assert configurations.choose("kernel", "shape", CANDIDATES, seconds, gpu) == Config(2, 1)
    assert configurations.choose("kernel", "shape", CANDIDATES, never, gpu) == Config(2, 1)
    configurations._known.cache_clear()
    chosen = configurations.choose("kernel", "shape", CANDIDATES, never, gpu)
    assert chosen == Config(2, 1)
    assert isinstance(chosen, Config)
    kept = json.loads((tmp_path / "cache" / "nestq" / "some-gpu.json").read_text())
    assert kept == {"kernel shape": [2, 1]}


def test_the_file_of_the_family_needs_no_measurement(gpu: torch.device, tmp_path: Path) -> None:
    (tmp_path / "sm70.json").write_text('{"kernel shape": [4, 2]}')
    assert configurations.choose("kernel", "shape", CANDIDATES, never, gpu) == Config(4, 2)
    assert configurations.choose("kernel", "other", CANDIDATES, never, gpu) == CANDIDATES[0]


def test_nothing_is_measured_while_a_graph_is_captured(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert configurations.choose("kernel", "shape", CANDIDATES, never, gpu) == CANDIDATES[0]


@pytest.mark.parametrize(
    "file", sorted((Path(configurations.__file__).parent / "configs").glob("*.json"))
)
def test_files_of_families_are_readable(file: Path) -> None:
    entries = json.loads(file.read_text())
    assert entries
    assert all(len(config) == 3 and min(config) > 0 for config in entries.values())
