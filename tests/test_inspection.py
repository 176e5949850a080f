"""The table of a checkpoint: what it says of layers, bytes and saturation."""

import json
import shutil
from pathlib import Path

import nested_models
import pytest
import small_models
import torch
from rich.console import Console
from safetensors import safe_open

from nestq import bitnest_w4w8, load, quantize_, save
from nestq.checkpoint import read_config
from nestq.inspection import checkpoint_table


def printed(folder: Path, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(checkpoint_table(folder, read_config(folder)))
    return capture.get()


def cells(text: str, row: str) -> list[str]:
    """What stands after the name of a row."""
    line = next(line for line in text.splitlines() if line.startswith(f"{row} "))
    return line.removeprefix(row).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nested by ``quantize_``, in several files."""
    model = small_models.build("llama-gqa", "odd", dtype=torch.bfloat16)
    quantize_(model, bitnest_w4w8(rotation="none"), progress=False)
    folder = tmp_path_factory.mktemp("checkpoints") / "nested"
    save(model, folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def stored_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor in the files, as safetensors reads them."""
    sizes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            sizes |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    return sizes


def test_bytes_are_those_in_the_files(folder: Path) -> None:
    text, sizes = printed(folder), stored_bytes(folder)

    for name in read_config(folder).modules:
        own = sum(sizes.pop(f"{name}.weight.{part}") for part in ("base", "refinement", "scale"))
        assert cells(text, name.removeprefix("model."))[1] == f"{own / 1024:,.1f}"
    assert cells(text, "dense (embedding, norms)") == [f"{sum(sizes.values()) / 1024:,.1f}"]


def test_totals_are_those_of_the_parts(folder: Path) -> None:
    text, sizes = printed(folder), stored_bytes(folder)
    rows = {"base planes": "base", "refinement planes": "refinement", "scales": "scale"}

    for row, part in rows.items():
        total = sum(size for name, size in sizes.items() if name.endswith(f".{part}"))
        assert cells(text, row) == [f"{total / 1024:,.1f}"]
    nested = sum(size for name, size in sizes.items() if name.endswith(tuple(rows.values())))
    assert cells(text, "15 linears")[0] == f"{nested / 1024:,.1f}"


def test_shapes_errors_and_saturation_are_those_of_the_report(folder: Path) -> None:
    text = printed(folder)
    report = read_config(folder).report
    assert report is not None
    assert len(report["linears"]) == 15

    for entry in report["linears"]:
        shape, _, *rest = cells(text, entry["name"].removeprefix("model."))
        assert shape == "x".join(map(str, entry["shape"]))
        keys = ("draft_error", "target_error", "saturation")
        assert rest == [f"{entry[key]:.2%}" for key in keys]
    assert cells(text, "15 linears")[1] == f"{report['saturation']:.2%}"
    assert "groups of 64, overlap 8, format 1" in " ".join(text.split())


def test_it_fits_80_columns_with_nothing_cut(folder: Path) -> None:
    # The title has a path of any length.
    lines = [line.rstrip() for line in printed(folder).splitlines() if line.startswith("l")]
    wide = [line.rstrip() for line in printed(folder, 200).splitlines() if line.startswith("l")]

    assert lines == wide
    assert len(lines) == 1 + 15
    assert max(map(len, lines)) <= 80


def test_a_checkpoint_without_report_has_dashes(tmp_path: Path) -> None:
    save(nested_models.nest_(small_models.build("llama-gqa")), tmp_path / "nested")

    shape, size, *rest = cells(printed(tmp_path / "nested"), "lm_head")
    assert (shape, rest) == ("-", ["-", "-", "-"])
    # 97 rows of 48 codes in 2 groups of 32: a base and a refinement nibble, and bfloat16 scales.
    assert size == f"{97 * (64 + 2 * 2) / 1024:.1f}"


def test_a_base_alone_has_no_refinement(folder: Path, tmp_path: Path) -> None:
    save(load(folder, planes="base"), tmp_path / "base")

    text = printed(tmp_path / "base")
    assert cells(text, "refinement planes") == ["0.0"]
    assert cells(text, "base planes") == cells(printed(folder), "base planes")


def test_a_missing_file_or_plane_is_refused(folder: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    index = json.loads((cut / "model.safetensors.index.json").read_text(encoding="utf-8"))
    name = "model.layers.1.mlp.up_proj.weight.refinement"
    lost = index["weight_map"][name]
    (cut / lost).unlink()
    with pytest.raises(FileNotFoundError, match=f"cut: the weight file {lost} is missing"):
        printed(cut)

    # The index then knows nothing of the file and its tensors.
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file != lost}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match=r"cut: tensor \S+ is missing"):
        printed(cut)

    (cut / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"index\.json: not an index of safetensors files"):
        printed(cut)
