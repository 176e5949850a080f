"""QuantSpec's attention kernel: near the reference, and the same bits however it is computed."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
from kernel_device import device
from torch import Tensor
from triton.runtime import interpreter

from nestq.kernels.attention_quantspec import quantspec_attention
from nestq.kernels.nested_attention import AttentionConfig
from nestq.reference import attention_quantspec as reference
from nestq.reference.kv_quantspec import (
    GROUP,
    dequantize_keys,
    dequantize_values,
    first_recent,
    quantize_keys,
    quantize_values,
)

CONFIGS = [AttentionConfig(*config) for config in ((8, 2), (16, 1), (16, 0))]


@pytest.fixture(autouse=True)
def _matrix_products_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, a product's sum does not depend on the size of the matrix.

    The interpreter's does, through BLAS. In float64 the sums of these tests are exact, or so near
    that they round to the same float32.
    """
    if not triton.knobs.runtime.interpret:
        return

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


class Call(NamedTuple):
    """Arguments of an attention, on the CPU: all keys and values, and what is kept of them."""

    query: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    key_planes: tuple[Tensor, Tensor, Tensor, Tensor]
    value_planes: tuple[Tensor, Tensor, Tensor, Tensor]
    window: int = 0
    draft: bool = False
    slots: int = 512

    @staticmethod
    def random(
        heads: tuple[int, int],
        head_dim: int,
        ends: list[int],
        count: int,
        window: int = 0,
        draft: bool = False,
        seed: int = 0,
    ) -> "Call":
        """The last ``count`` positions before the end of each row, which may begin with pads."""
        torch.manual_seed(seed)
        tokens = -(-max(ends) // GROUP) * GROUP
        shape = len(ends), heads[1], tokens, head_dim
        channels = torch.randn(1, heads[1], 1, head_dim)
        keys = ((torch.randn(shape) + channels) * (channels / 2).exp()).half()
        values = (torch.randn(shape) + torch.randn(*shape[:3], 1)).half()
        query = torch.randn(len(ends), heads[0], count, head_dim).half()
        positions = torch.tensor([[max(end - count + i, -1) for i in range(count)] for end in ends])
        planes = quantize_keys(keys), quantize_values(values)
        return Call(query, positions, keys, values, *planes, window, draft)

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5

    def select(self, batch: slice, queries: slice) -> "Call":
        parts = {
            name: tuple(plane[batch] for plane in getattr(self, name))
            for name in ("key_planes", "value_planes")
        }
        rows = {"keys": self.keys[batch], "values": self.values[batch]}
        query, positions = self.query[batch, :, queries], self.positions[batch, queries]
        return self._replace(query=query, positions=positions, **rows, **parts)

    def buffers(self) -> list[Tensor]:
        """The last tokens of each row in their slots, over what was there before."""
        buffers = []
        for states in (self.keys, self.values):
            buffer = torch.zeros(*states.shape[:2], self.slots, states.shape[3], dtype=states.dtype)
            for b, last in enumerate(max(row, default=-1) for row in self.positions.tolist()):
                tokens = torch.arange(max(last + 1 - self.slots, 0), last + 1)
                buffer[b, :, tokens % self.slots] = states[b, :, tokens]
            buffers.append(buffer)
        return buffers

    def arguments(self) -> list[Any]:
        planes = [*self.key_planes, *self.value_planes]
        if self.draft:
            planes[1] = planes[5] = None
        return [*planes, *self.buffers()]

    def kernel(self, config: AttentionConfig | None = None) -> Tensor:
        operands = [self.query, self.positions, *self.arguments()]
        operands = [x if x is None else x.to(device()) for x in operands]
        return quantspec_attention(*operands, self.scaling, self.window, config).cpu()

    def reference(self) -> Tensor:
        """In float64."""
        operands = self.query.double(), self.positions, *self.arguments()
        return reference.quantspec_attention(*operands, self.scaling, self.window)

    def seen(self) -> tuple[Tensor, Tensor]:
        """Whether a query sees a token, and whether quantized, ``[B, 1, n, T]``."""
        distance = self.positions[:, None, :, None] - torch.arange(self.keys.shape[2])
        visible = (distance >= 0) & (distance < (self.window or self.keys.shape[2]))
        first = first_recent(self.positions)[:, None, :, None]
        return visible, torch.arange(self.keys.shape[2]) < first

    def budget(self) -> Tensor:
        """How far a result may be from exact arithmetic, ``[B, H, n, 1]``.

        A scaled query is rounded to float16, 2^-12 of each product with a quantized key, where code
        and zero point are counted apart, and sums in float32 lose a little: a score is off by up to
        delta, and a weight relative to the others by a factor of up to exp(2 delta). Then a weight
        is rounded to float16 (2^-11), the sum of the weights of 64 keys to a grid (2^-12), and so
        are their zero points (2^-12 of the largest value); sums over keys are in float32, and the
        result in float16 (2^-11).
        """
        visible, old = self.seen()
        group = self.query.shape[1] // self.keys.shape[1]
        fine = [None, None] if self.draft else [self.key_planes[1], self.value_planes[1]]
        base, _, scale, zero = self.key_planes
        centered = dequantize_keys(base, fine[0], scale, 0 * zero, torch.float64)
        sizes = centered.abs() + zero.double().abs().repeat_interleave(GROUP, 2)
        base, _, scale, zero = self.value_planes
        quantized = dequantize_values(base, fine[1], scale, zero, torch.float64)
        keys, recent, values = (
            x.double().abs().repeat_interleave(group, 1)
            for x in (sizes, self.keys, torch.maximum(quantized.abs(), self.values.double().abs()))
        )
        query = self.query.double().abs()
        channels = self.query.shape[3] + 8
        loss = query @ keys.mT * (2.0**-12 + channels * 2.0**-24)
        loss = torch.where(old, loss, query @ recent.mT * channels * 2.0**-24)
        delta = loss.masked_fill(~visible, 0).amax(-1, keepdim=True) * self.scaling
        largest = values.amax(-1)[:, :, None].expand_as(loss).masked_fill(~visible, 0)
        rounding = 2 * 2.0**-11 + 2 * 2.0**-12 + (keys.shape[2] + 8) * 2.0**-24
        return largest.amax(-1, keepdim=True) * ((2 * delta).expm1() + rounding)


def check(call: Call, config: AttentionConfig | None = None) -> None:
    out, expected = call.kernel(config), call.reference()
    assert ((out - expected).abs() <= call.budget()).all()
    pads = (call.positions < 0)[:, None, :, None].expand_as(out)
    assert not out[pads].any()


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "ends", "count", "window"),
    [
        ((1, 1), 64, [1, 256], 1, 0),
        ((3, 1), 64, [514, 258], 5, 0),
        ((2, 2), 80, [700, 4], 5, 0),
        ((2, 1), 128, [386, 130], 3, 0),
        ((1, 1), 128, [1000], 1, 500),
        ((1, 1), 256, [514], 2, 0),
        ((2, 1), 6, [514, 385], 3, 1),
    ],
)
def test_it_is_near_the_reference(
    heads: tuple[int, int], head_dim: int, ends: list[int], count: int, window: int, draft: bool
) -> None:
    check(Call.random(heads, head_dim, ends, count, window, draft))


def test_precision_changes_where_positions_say() -> None:
    """Planes of 2 are unlike the buffer, so a token read from the wrong one of them shows."""
    call = Call.random((1, 1), 64, [515], 6)
    base, fine, scale, zero = call.value_planes
    unlike = call._replace(value_planes=(base, fine, 0 * scale, 0 * zero + 2), query=0 * call.query)
    unlike = unlike._replace(values=0 * call.values)
    expected = first_recent(call.positions) / (call.positions + 1) * 2
    out = unlike.kernel()
    assert (out[:, 0, :, 0] - expected).abs().max() < 2**-8
    assert torch.equal(out, out[..., :1].expand_as(out))


@pytest.mark.parametrize(("head_dim", "window", "draft"), [(64, 290, False), (80, 0, True)])
def test_no_division_of_the_work_changes_a_bit(head_dim: int, window: int, draft: bool) -> None:
    call = Call.random((3, 1), head_dim, [771], 5, window, draft)
    out = call.kernel()
    for config in CONFIGS:
        assert torch.equal(call.kernel(config), out), config


def test_a_row_has_the_same_bits_alone_in_a_prompt_and_in_larger_caches() -> None:
    call = Call.random((2, 1), 64, [514, 386], 20)
    prompt = call.kernel()
    assert torch.equal(call._replace(slots=768).kernel(), prompt)
    rest = [torch.full_like(plane, 0x5A) for plane in (*call.key_planes, *call.value_planes)]
    for plane in (*rest[2:4], *rest[6:]):
        plane.fill_(torch.nan)
    planes = [
        torch.cat(pair, 2)
        for pair in zip((*call.key_planes, *call.value_planes), rest, strict=True)
    ]
    larger = call._replace(key_planes=tuple(planes[:4]), value_planes=tuple(planes[4:]))
    for batch in range(2):
        # The last position alone fits a buffer of 256 slots, which then begins within a split.
        for queries, slots in ((slice(19, 20), 256), (slice(15, 20), 512)):
            part = larger.select(slice(batch, batch + 1), queries)._replace(slots=slots)
            assert torch.equal(part.kernel(), prompt[batch : batch + 1, :, queries])


def test_keys_with_large_channels_and_values_of_equal_numbers() -> None:
    call = Call.random((2, 1), 64, [390], 2)
    keys, values = call.keys.clone(), call.values.clone()
    keys[..., 5] *= 30
    values[:, :, ::3] = values[:, :, ::3, :1]  # scale 0, and only a zero point
    values[:, :, 1::3] = 0
    planes = {"key_planes": quantize_keys(keys), "value_planes": quantize_values(values)}
    call = call._replace(keys=keys, values=values, **planes)
    check(call)
    check(call._replace(query=0 * call.query))
    nothing = quantize_values(0 * values)
    assert not call._replace(values=0 * values, value_planes=nothing).kernel().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_in_a_group_shows_where_it_is_read_quantized() -> None:
    call = Call.random((1, 1), 64, [385], 2)
    call.key_planes[3][:, :, 1, 7] = torch.nan
    out = call.kernel()
    assert not out[:, :, 0].isnan().any()
    assert out[:, :, 1].isnan().all()


def test_a_strided_float32_query_and_no_queries() -> None:
    call = Call.random((2, 1), 64, [386], 3)
    wide = call.query.float().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(call._replace(query=wide).kernel().half(), call.kernel())
    assert call.select(slice(0, 1), slice(0, 0)).kernel().shape == (1, 2, 0, 64)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.double(), "query must be float16"),
        (0, lambda x: x[..., :62], "query must be"),
        (1, lambda x: x.to("meta"), "positions must be on the device"),
        (2, lambda x: x[:, :, :100], "key base must be"),
        (4, lambda x: x.mT.contiguous().mT, "key_scale must be contiguous"),
        (9, lambda x: x.double(), "value zero must be"),
        (7, lambda x: None, "must both be given or both be None"),
        (10, lambda x: x.float(), "recent_keys must be float16 or bfloat16"),
        (10, lambda x: x[:, :, :500], "recent_keys must be|recent_values must be"),
        (11, lambda x: x.bfloat16(), "recent_values must be torch.float16"),
        (14, lambda x: AttentionConfig(32, 0), "at most 16 rows, got 32"),
    ],
)
def test_what_does_not_fit_is_refused(
    index: int, change: Callable[[Any], Any], message: str
) -> None:
    call = Call.random((2, 1), 64, [300], 3)
    arguments = [call.query, call.positions, *call.arguments(), call.scaling, 0, None]
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match=message):
        quantspec_attention(*arguments)


COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nestq.kernels.attention_quantspec_kernels import combine_quantspec_kernel, quantspec_kernel


def build(kernel, pointers, constants, warps):
    types = {name: "*" + dtype for name, dtype in pointers.items()}
    scalars = {name: {"score_factor": "fp32"}.get(name, "i32") for name in kernel.arg_names}
    signature = scalars | types | dict.fromkeys(constants, "constexpr")
    aligned = [i for i, name in enumerate(kernel.arg_names) if name in types]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target, options)
    # What GPUs of compute capability 8.6 and 8.9 have for a program.
    assert compiled.metadata.shared <= 99 * 1024
    return compiled.asm["ptx"]


partial = dict.fromkeys(("sums", "exponents", "peaks", "totals"), "fp32") | {"positions": "i64"}
scales = ("key_scale", "key_zero", "value_scale", "value_zero")
planes = ("key_base", "key_refinement", "value_base", "value_refinement")
pointers = partial | dict.fromkeys(("query", "out", "recent_keys", "recent_values"), "bf16")
pointers |= dict.fromkeys(scales, "fp32") | dict.fromkeys(planes, "i8")
constants = {"HEAD_DIM": 64, "PADDED": 32, "ROWS": 8, "VECTOR": 8, "RECENT_VECTOR": 8}
constants |= {"VALUE_GROUPS": 1, "READ": 1, "WINDOW": True, "ALL_SPLITS": False, "ASM": True}
ptx = build(quantspec_kernel, pointers, constants, warps=4)
for number in ("f16", "bf16"):
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32" in ptx
constants = {"HEAD_DIM": 80, "COLUMNS": 32, "PADDED_PARTS": 16, "UNROLL": 16, "WINDOW": True}
build(combine_quantspec_kernel, partial | {"out": "bf16"}, constants, warps=1)
"""


@pytest.mark.parametrize("capability", [90])
def test_kernels_compile(capability: int) -> None:
    command = [sys.executable, "-c", COMPILE, str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
