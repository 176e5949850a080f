"""A tiny random model for the command ``nestq``, dense and nested."""

import shutil
from pathlib import Path

import pytest
import tiny_checkpoint

from nestq import cli


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, and no network."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "dense"
    tiny_checkpoint.save_dense(folder)
    return str(folder)


@pytest.fixture(scope="session")
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
