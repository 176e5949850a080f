"""A configuration comes from a file, and is measured only where no file knows it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton

from nestq.kernels import configurations
from nestq.kernels.dual_plane_linear import LinearConfig, bucket


class Config(NamedTuple):
    warps: int
    tiles: int


CANDIDATES = [Config(1, 1), Config(2, 1), Config(4, 2)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    """A GPU in name, with measured times that are best for the second candidate."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(configurations, "FAMILY_FILES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(configurations, "do_bench", lambda run, **_: run())
    configurations._chosen.clear()
    yield torch.device("cuda")
    configurations._chosen.clear()


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
    configurations._chosen.clear()
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


def test_what_does_not_fit_is_left_out(gpu: torch.device) -> None:
    def run(config: Config) -> float:
        if config.tiles == 1:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return 1.0

    assert configurations.choose("kernel", "shape", CANDIDATES, run, gpu) == Config(4, 2)


def test_entries_of_other_shapes_stay(gpu: torch.device, tmp_path: Path) -> None:
    configurations.choose("kernel", "one", CANDIDATES, seconds, gpu)
    configurations.choose("kernel", "other", CANDIDATES, seconds, gpu)
    kept = json.loads((tmp_path / "cache" / "nestq" / "some-gpu.json").read_text())
    assert kept == {"kernel one": [2, 1], "kernel other": [2, 1]}


@pytest.mark.parametrize("text", ["{", '{"kernel shape": [1, 2, 3]}'])
@pytest.mark.filterwarnings("ignore:.*cannot be read and is not used")
def test_a_cache_that_says_nothing_is_measured_again(
    gpu: torch.device, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "cache" / "nestq" / "some-gpu.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert configurations.choose("kernel", "shape", CANDIDATES, seconds, gpu) == Config(2, 1)
    assert json.loads(file.read_text()) == {"kernel shape": [2, 1]}


def test_a_cache_that_cannot_be_written_is_done_without(gpu: torch.device, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="cannot be written, so this is not kept"):
        assert configurations.choose("kernel", "shape", CANDIDATES, seconds, gpu) == Config(2, 1)


def test_threads_measure_once(gpu: torch.device) -> None:
    measured = []

    def run(config: Config) -> float:
        measured.append(config)
        return seconds(config)

    def choose(_: int) -> Config:
        return configurations.choose("kernel", "shape", CANDIDATES, run, gpu)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(choose, range(20))) == {Config(2, 1)}
    assert measured == CANDIDATES


@pytest.mark.parametrize(
    "file", sorted((Path(configurations.__file__).parent / "configs").glob("*.json"))
)
def test_files_of_families_name_shapes_that_are_looked_up(file: Path) -> None:
    names = {
        f"dual_plane_linear {bucket(tiles, blocks, both, tokens)}"
        for tiles in (2**n for n in range(16))
        for blocks in (2**n for n in range(12))
        for both in (False, True)
        for tokens in (1, 8, 16, 32, 64)
    }
    entries = json.loads(file.read_text())
    assert entries
    assert entries.keys() <= names
    for entry in entries.values():
        config = LinearConfig(*entry)
        assert config.warps in (1, 2, 4, 8, 16)
        assert config.tiles in (1, 2, 4, 8)
        assert config.stages >= 1


def test_shapes_of_llama_2_7b_are_in_the_file_of_hopper() -> None:
    entries = json.loads(
        (Path(configurations.__file__).parent / "configs" / "sm90.json").read_text()
    )
    for rows, columns in ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)):
        for both, tokens in ((False, 1), (True, 1), (True, 5)):
            name = bucket(rows // 16, columns // 64, both, tokens)
            assert f"dual_plane_linear {name}" in entries
