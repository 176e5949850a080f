"""The linear layers in C++ give the reference's bits, whatever the shapes and the numbers."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from same_bits import same_bits
from torch import Tensor

import nestq
from nestq import ops
from nestq.cpu import linear as cpu_linear
from nestq.cpu.library import compile_library
from nestq.reference.linear import nested_linear
from nestq.reference.weights import dequantize


@pytest.fixture(scope="module")
def compiled() -> Any:
    return compile_library()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def planes(rows: int, columns: int, group_size: int, overlap: int = 8) -> list[Tensor]:
    groups = -(-columns // group_size)
    shape = (rows, groups * group_size // 2)
    base, refinement = (torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(2))
    if overlap == 16:  # composed codes of a base of -8 must stay in a byte
        refinement |= 0x88
    return [base, refinement, torch.rand(rows, groups).to(torch.bfloat16)]


@pytest.mark.parametrize("group_size", cpu_linear.GROUP_SIZES)
@pytest.mark.parametrize("columns", [64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 17, 576])
def test_bits_of_the_reference(compiled: Any, rows: int, columns: int, group_size: int) -> None:
    torch.manual_seed(rows + columns + group_size)
    for overlap, tokens, with_bias in itertools.product((1, 3, 8, 16), (1, 5, 64), (False, True)):
        base, refinement, scale = planes(rows, columns, group_size, overlap)
        x = torch.randn(tokens, columns, dtype=torch.bfloat16)
        bias = torch.randn(rows) if with_bias else None
        for fine in (refinement, None):
            arguments = (x, base, fine, scale, bias, group_size, overlap)
            out = cpu_linear.nested_linear(compiled, *arguments)
            assert same_bits(out, nested_linear(*arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bits_of_all_kinds_of_numbers(
    compiled: Any, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    base, refinement, scale = planes(40, 200, 32)
    scale = scale.to(scale_dtype)
    scale[0] = 0
    scale[1, 1] = torch.nan
    scale[2, 0] = torch.inf
    scale[3] *= 1e-6
    scale[4] = torch.finfo(scale_dtype).smallest_normal / 4
    scale[5] = torch.finfo(scale_dtype).max
    x = torch.randn(9, 200, dtype=dtype)
    x[0] = 0
    x[1, 3] = torch.nan
    x[2, 150] = -torch.inf
    x[3] = torch.finfo(dtype).smallest_normal / 4
    x[4] = 127 * x[4].sign()
    x[5] = torch.arange(200).to(dtype) + 0.5  # halfway between codes
    for fine, bits in itertools.product((refinement, None), (8, 4)):
        bias = torch.randn(40, dtype=dtype)
        arguments = (x.view(3, 3, 200), base, fine, scale, bias, 32, 5, bits)
        out = cpu_linear.nested_linear(compiled, *arguments)
        assert same_bits(out, nested_linear(*arguments))
        assert out.dtype == dtype
        assert out.isfinite().any()


@pytest.mark.parametrize("fill", [0x00, 0x77, 0x88, 0xFF])
def test_extreme_codes(compiled: Any, fill: int) -> None:
    base, refinement, scale = planes(3, 4096, 128, 16)
    base.fill_(fill)
    refinement.fill_(0xFF if fill == 0x77 else 0x88)
    scale.fill_(1)  # the largest scale code
    x = torch.full((2, 4096), 3.0)
    x[1] *= -1
    for fine in (refinement, None):
        arguments = (x, base, fine, scale, None, 128, 16)
        assert same_bits(cpu_linear.nested_linear(compiled, *arguments), nested_linear(*arguments))


def test_threads_change_nothing(compiled: Any, two_threads: None) -> None:
    base, refinement, scale = planes(1537, 576, 64)
    x = torch.randn(5, 576)
    arguments = (x, base, refinement, scale, None, 64, 8)
    assert same_bits(cpu_linear.nested_linear(compiled, *arguments), nested_linear(*arguments))


def test_planes_and_inputs_with_strides(compiled: Any) -> None:
    base, refinement, scale = planes(32, 128, 64)
    x = torch.randn(128, 4).T
    bias = torch.randn(64)[::2]
    parts = (base[::2], refinement[::2], scale[::2], bias[::2])
    assert same_bits(
        cpu_linear.nested_linear(compiled, x, *parts, 64, 8),
        nested_linear(x, *(part.contiguous() for part in parts), 64, 8),
    )


@pytest.mark.parametrize("tokens", [0, 1, 64, 65])
@pytest.mark.parametrize("group_size", [16, 64])
def test_the_operator_takes_any_input(
    tokens: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, refinement, scale = planes(24, 128, group_size)
    x = torch.randn(tokens, 128)
    calls = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return inner(*arguments)

    inner = cpu_linear.nested_linear
    monkeypatch.setattr(cpu_linear, "nested_linear", counted)
    out = torch.ops.nestq.dual_plane_linear(x, base, refinement, scale, None, None, group_size, 8)
    assert same_bits(out, nested_linear(x, base, refinement, scale, None, group_size, 8))
    assert len(calls) == (group_size == 64 and 0 < tokens <= cpu_linear.MAX_TOKENS)


def test_the_reference_can_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("the reference was selected")

    monkeypatch.setattr(ops, "library", fail)
    base, refinement, scale = planes(24, 128, 64)
    x = torch.randn(2, 128)
    nestq.select_implementation("reference")
    try:
        out = torch.ops.nestq.dual_plane_linear(x, base, refinement, scale, None, None, 64, 8)
    finally:
        nestq.select_implementation("kernels")
    assert same_bits(out, nested_linear(x, base, refinement, scale, None, 64, 8))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("base", lambda base, fine, scale, bias: (base[:, :-1], fine, scale, bias)),
        ("base", lambda base, fine, scale, bias: (base.to(torch.int8), fine, scale, bias)),
        ("refinement", lambda base, fine, scale, bias: (base, fine[:-1], scale, bias)),
        ("scale", lambda base, fine, scale, bias: (base, fine, scale[:, :-1], bias)),
        ("bias", lambda base, fine, scale, bias: (base, fine, scale, bias[:-1])),
    ],
)
def test_what_does_not_fit_is_refused(compiled: Any, name: str, change: Any) -> None:
    wrong = change(*planes(24, 128, 64), torch.zeros(24))
    with pytest.raises(ValueError, match=f"^{name} must"):
        cpu_linear.nested_linear(compiled, torch.randn(1, 128), *wrong, 64, 8)


@pytest.mark.parametrize("overlap", [0, 17])
def test_overlaps_out_of_range_are_refused(compiled: Any, overlap: int) -> None:
    with pytest.raises(ValueError, match=f"overlap must be from 1 to 16, got {overlap}"):
        cpu_linear.nested_linear(
            compiled, torch.randn(1, 128), *planes(24, 128, 64), None, 64, overlap
        )


@pytest.mark.parametrize("group_size", cpu_linear.GROUP_SIZES)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float_weights_of_a_base(compiled: Any, group_size: int, scale_dtype: torch.dtype) -> None:
    torch.manual_seed(group_size)
    for rows, columns in ((17, 64), (40, 1000)):
        base, _, scale = planes(rows, columns, group_size)
        scale = scale.to(scale_dtype)
        out = cpu_linear.dequantize_base(compiled, base, scale, group_size, columns)
        expected = dequantize(base, None, scale, group_size, 1, columns, torch.float32)
        assert same_bits(out, expected.contiguous())
    with pytest.raises(ValueError, match="base must be uint8 of shape"):
        cpu_linear.dequantize_base(compiled, base, scale, group_size, 2000)
