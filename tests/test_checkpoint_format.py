"""Checkpoint headers: read without data, and every kind of damage has its message."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nestq.checkpoint_format import (
    StoredTensor,
    check_dense_weights,
    check_nested_weights,
    check_planes_option,
    check_scales,
    plane_tensors,
    read_headers,
)
from nestq.reference.weights import round_scale

# A weight of 7 x 100 in groups of 32.
GOOD = {
    "up.weight.base": StoredTensor("file", "U8", (7, 64)),
    "up.weight.refinement": StoredTensor("file", "U8", (7, 64)),
    "up.weight.scale": StoredTensor("file", "BF16", (7, 4)),
    "up.bias": StoredTensor("file", "BF16", (7,)),
}
SHAPES = {"up": (7, 100)}


def test_reads_names_dtypes_and_shapes(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    save_file({"a": torch.zeros(2, 3, dtype=torch.uint8)}, first)
    save_file({"b": torch.zeros(5, dtype=torch.bfloat16)}, second)
    assert read_headers([first, str(second)]) == {
        "a": StoredTensor(str(first), "U8", (2, 3)),
        "b": StoredTensor(str(second), "BF16", (5,)),
    }


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors: not a complete safetensors file"):
        read_headers([path])


def test_file_of_another_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        read_headers([path])


def test_tensor_in_two_files(tmp_path: Path) -> None:
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path in paths:
        save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"2\.safetensors: tensor a is in .*1\.safetensors too"):
        read_headers(paths)


def test_complete_weight() -> None:
    assert check_nested_weights(GOOD, SHAPES, 32, "both") == {"up": 2 * 7 * 64 + 7 * 4 * 2}
    assert check_nested_weights(GOOD, SHAPES, 32, "base") == {"up": 7 * 64 + 7 * 4 * 2}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_scale_may_be_any_float(dtype: str) -> None:
    check_nested_weights(
        GOOD | {"up.weight.scale": StoredTensor("file", dtype, (7, 4))}, SHAPES, 32, "both"
    )


@pytest.mark.parametrize("part", ["base", "refinement", "scale"])
def test_missing_part(part: str) -> None:
    headers = {name: tensor for name, tensor in GOOD.items() if name != f"up.weight.{part}"}
    with pytest.raises(ValueError, match=f"file: tensor up.weight.{part} is missing"):
        check_nested_weights(headers, SHAPES, 32, "both")


def test_base_alone_needs_no_refinement() -> None:
    headers = {name: tensor for name, tensor in GOOD.items() if "refinement" not in name}
    check_nested_weights(headers, SHAPES, 32, "base")


@pytest.mark.parametrize(
    ("part", "dtype", "shape", "message"),
    [
        ("base", "U8", (7, 50), r"must be U8 of shape \(7, 64\).*found U8 of shape \(7, 50\)"),
        ("base", "I8", (7, 64), r"must be U8.*found I8"),
        (
            "refinement",
            "U8",
            (6, 64),
            r"must be U8 of shape \(7, 64\).*found U8 of shape \(6",
        ),
        ("scale", "U8", (7, 4), r"must be BF16 or F16 or F32 or F64.*found U8"),
        ("scale", "BF16", (7, 2), r"must be .* of shape \(7, 4\).*found BF16 of shape \(7, 2\)"),
    ],
)
def test_wrong_part(part: str, dtype: str, shape: tuple[int, ...], message: str) -> None:
    name = f"up.weight.{part}"
    headers = GOOD | {name: StoredTensor("other file", dtype, shape)}
    with pytest.raises(ValueError, match=f"other file: tensor {name} {message}"):
        check_nested_weights(headers, SHAPES, 32, "both")


def test_wrong_group_size() -> None:
    with pytest.raises(ValueError, match=r"groups of 64, found .* of shape \(7, 4\)"):
        check_nested_weights(GOOD, SHAPES, 64, "both")


@pytest.mark.parametrize("planes", ["both", "base"])
def test_weight_of_no_module(planes: str) -> None:
    headers = GOOD | {"down.weight.refinement": StoredTensor("file", "U8", (7, 64))}
    with pytest.raises(ValueError, match=r"tensor down\.weight\.refinement belongs to no module"):
        check_nested_weights(headers, SHAPES, 32, planes)


def test_dense_weights() -> None:
    check_dense_weights(GOOD, {"up.bias": (7,)})
    with pytest.raises(ValueError, match=r"tensor norm\.weight is missing"):
        check_dense_weights(GOOD, {"up.bias": (7,), "norm.weight": (7,)})
    with pytest.raises(ValueError, match=r"up\.bias must be of shape \(8,\), found \(7,\)"):
        check_dense_weights(GOOD, {"up.bias": (8,)})


def test_a_dense_tensor_too_many_hides_none_that_is_missing() -> None:
    headers = GOOD | {"extra": StoredTensor("file", "F32", (1,))}
    check_dense_weights(headers, {"up.bias": (7,)})
    with pytest.raises(ValueError, match=r"tensor norm\.weight is missing"):
        check_dense_weights(headers, {"up.bias": (7,), "norm.weight": (7,)})


def test_dense_names_that_transformers_changes_are_left_to_it() -> None:
    check_dense_weights(GOOD, {"model.up.bias": (7,)}, renamed=True)
    with pytest.raises(ValueError, match=r"up\.bias must be of shape"):
        check_dense_weights(GOOD, {"up.bias": (8,)}, renamed=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [-1.0, torch.inf, torch.nan])
def test_scales_that_are_no_scales(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    path = tmp_path / "model.safetensors"
    scale = torch.tensor([[0.0, -0.0], [1.0, 2.0]], dtype=dtype)
    save_file({"up.weight.scale": scale}, path)
    check_scales(read_headers([path]), ["up"])
    scale[1, 0] = value
    save_file({"up.weight.scale": scale}, path)
    with pytest.raises(ValueError, match=r"up\.weight\.scale must be finite and not negative"):
        check_scales(read_headers([path]), ["up"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scales_that_linear_layers_would_change(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    scale = torch.tensor([[1.0, 0.5], [1.0, 1e-5]], dtype=dtype)
    save_file({"up.weight.scale": round_scale(scale, dtype)}, path)
    check_scales(read_headers([path]), ["up"])
    save_file({"up.weight.scale": scale}, path)
    message = r"up\.weight\.scale must be exact in fixed point.*in row 1, group 1.*round_scale"
    with pytest.raises(ValueError, match=message):
        check_scales(read_headers([path]), ["up"])


def test_planes() -> None:
    assert plane_tensors("both") == ("base", "refinement", "scale")
    assert plane_tensors("base") == ("base", "scale")
    with pytest.raises(ValueError, match=r"planes must be one of \('both', 'base'\), got 'draft'"):
        check_planes_option("draft")
