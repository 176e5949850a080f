"""Without a compiler the reference computes, and says so once."""

import warnings
from pathlib import Path

import pytest
import torch

from nestq.cpu import library as cpu_library
from nestq.reference.linear import nested_linear


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "_tried", False)
    monkeypatch.setattr(cpu_library, "_library", None)


def linear(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randint(0, 256, (5, 32), dtype=torch.uint8)
    scale = torch.rand(5, 1)
    out = torch.ops.nestq.dual_plane_linear(x, base, None, scale, None, None, 64, 8)
    return out, nested_linear(x, base, None, scale, None, 64, 8)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [(None, "there is no C\\+\\+ compiler"), ("no-such-compiler", "no-such-compiler")],
)
def test_no_compiler(
    untried: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compiler: str | None,
    reason: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=f"(?s)nestq runs eager PyTorch.*{reason}"):
        out, expected = linear(torch.randn(2, 64))
    assert torch.equal(out, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, expected = linear(torch.randn(2, 64))
    assert torch.equal(out, expected)


def test_a_compiler_that_refuses(
    untried: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusing = tmp_path / "refusing"
    refusing.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("CXX", str(refusing))
    with pytest.warns(UserWarning, match="no such option"):
        assert cpu_library.library() is None


def test_a_library_that_cannot_be_loaded(
    untried: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    empty.chmod(0o755)
    monkeypatch.setenv("CXX", str(empty))
    with pytest.warns(UserWarning, match="nestq_cpu.so"):
        assert cpu_library.library() is None


def test_compiled_once(untried: None) -> None:
    made = cpu_library.library()
    assert made is not None
    assert cpu_library.library() is made


def test_threads_that_work_deserves() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert cpu_library.threads_for(10) == 1
        assert cpu_library.threads_for(cpu_library.WORK_OF_A_THREAD * 2) == 2
        assert cpu_library.threads_for(1 << 40) == 2
    finally:
        torch.set_num_threads(before)
