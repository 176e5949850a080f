"""The attention kernels: near the reference, and the same bits for a row however it is computed."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
from kernel_device import device
from torch import Tensor
from triton.runtime import interpreter

from nestq.kernels import nested_attention as module
from nestq.kernels.kv_codes import BOTH
from nestq.kernels.nested_attention import AttentionConfig, attention_16, nested_attention
from nestq.reference import attention as reference
from nestq.reference.kv import dequantize_kv, quantize_kv
from nestq.reference.weights import pack_base, pack_refinement

CONFIGS = [AttentionConfig(*config) for config in ((8, 2), (16, 1), (32, 0))]


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


class Planes(NamedTuple):
    """Nested keys or values."""

    base: Tensor
    refinement: Tensor | None
    scale: Tensor

    def map(self, function: Any) -> "Planes":
        return Planes(*(None if plane is None else function(plane) for plane in self))

    def dense(self) -> Tensor:
        return dequantize_kv(*self, torch.float64)


class Call(NamedTuple):
    """Arguments of an attention, on the CPU."""

    query: Tensor
    positions: Tensor
    keys: Planes
    values: Planes
    window: int = 0
    recent: int = 0
    sink: int = 0
    local: int = 0

    @staticmethod
    def random(
        heads: tuple[int, int],
        head_dim: int,
        slots: int,
        count: int,
        batch: int = 2,
        read: str = "kv8",
        window: int = 0,
        seed: int = 0,
    ) -> "Call":
        """The last ``count`` positions of the first row; others end earlier, or begin with pads."""
        torch.manual_seed(seed)
        shape = batch, heads[1], slots, head_dim
        keys, values = (
            Planes(*quantize_kv(torch.randn(shape) * torch.randn(*shape[:3], 1).exp()))
            for _ in range(2)
        )
        if read == "kv4":
            keys, values = (entries._replace(refinement=None) for entries in (keys, values))
        query = torch.randn(batch, heads[0], count, head_dim).half()
        positions = torch.arange(slots - count, slots).repeat(batch, 1)
        positions -= torch.arange(batch)[:, None] * (slots // 3)
        recent = 7 if read == "recent" else 0
        return Call(query, positions.clamp(min=-1), keys, values, window, recent)

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def options(self) -> tuple[float, int, int, int, int]:
        """Arguments that are numbers."""
        return self.scaling, self.window, self.recent, self.sink, self.local

    def select(self, batch: slice, queries: slice) -> "Call":
        keys, values = (entries.map(lambda x: x[batch]) for entries in (self.keys, self.values))
        query, positions = self.query[batch, :, queries], self.positions[batch, queries]
        return self._replace(query=query, positions=positions, keys=keys, values=values)

    def kernel(self, config: AttentionConfig | None = None) -> Tensor:
        keys, values = (entries.map(lambda x: x.to(device())) for entries in self[2:4])
        operands = self.query.to(device()), self.positions.to(device()), *keys, *values
        return nested_attention(*operands, *self.options, config=config).cpu()

    def reference(self) -> Tensor:
        """In float64."""
        return reference.nested_attention(
            self.query.double(), self.positions, *self.keys, *self.values, *self.options
        )

    def by_head(self, entries: Tensor) -> Tensor:
        """Keys or values ``[B, H, S, D]`` of each query head, in float64."""
        return entries.double().repeat_interleave(self.query.shape[1] // entries.shape[1], 1)

    def visible(self) -> Tensor:
        """Whether a key is visible, ``[B, 1, n, S]``."""
        slot = torch.arange(self.keys.base.shape[2])
        distance = self.positions[:, None, :, None] - slot
        near = (distance < (self.local or len(slot))) | (slot < self.sink)
        return (distance >= 0) & (distance < (self.window or len(slot))) & near

    def budget(self) -> Tensor:
        """How far a result may be from exact arithmetic, ``[B, H, n, 1]``.

        A float16 query is exact, and a product of codes off by what float32 sums lose: a score by
        up to ``delta``, and a weight relative to the others by a factor of up to exp(2 delta). Then
        a weight is rounded to float16 (2^-11), the sum of the weights of 64 keys to a grid (64
        times 2^-19 of at least 1/2, so 2^-12), sums over keys to float32, the result to float16.
        """
        visible = self.visible()
        # A draft's key or value may be half a step of s larger than the target's.
        keys, values = (
            self.by_head(entries.dense()).abs() + self.by_head(entries.scale)[..., None] / 2
            for entries in (self.keys, self.values)
        )
        scores = (self.query.double().abs() @ keys.mT).masked_fill(~visible, 0)
        largest_value = values.amax(-1)[:, :, None].expand_as(scores).masked_fill(~visible, 0)
        delta = scores.amax(-1, keepdim=True) * self.scaling * (keys.shape[3] + 8) * 2.0**-24
        error = (2 * delta).expm1() + 2**-11 + 2**-12 + (keys.shape[2] + 8) * 2.0**-24 + 2**-11
        return largest_value.amax(-1, keepdim=True) * error


def check(call: Call, config: AttentionConfig | None = None) -> None:
    out, expected = call.kernel(config), call.reference()
    assert ((out - expected).abs() <= call.budget()).all()
    pads = (call.positions < 0)[:, None, :, None].expand_as(out)
    assert not out[pads].any()


@pytest.mark.parametrize("read", ["kv8", "kv4", "recent"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "slots", "count", "window"),
    [
        ((1, 1), 64, 1, 1, 0),
        ((3, 1), 64, 127, 5, 0),
        ((6, 2), 64, 129, 3, 0),
        ((1, 1), 80, 300, 1, 0),
        ((1, 1), 96, 129, 2, 100),
        ((2, 1), 128, 300, 5, 0),
        ((4, 1), 256, 40, 5, 0),
        ((2, 1), 6, 129, 2, 1),
        ((1, 1), 24, 530, 16, 300),
    ],
)
def test_it_is_near_the_reference(
    heads: tuple[int, int], head_dim: int, slots: int, count: int, window: int, read: str
) -> None:
    check(Call.random(heads, head_dim, slots, count, read=read, window=window))


@pytest.mark.parametrize("read", ["kv8", "kv4", "recent"])
def test_a_prompt_is_near_the_reference(read: str) -> None:
    check(Call.random((2, 1), 64, 270, 24, read=read))
    check(Call.random((1, 1), 80, 300, 40, batch=1, read=read, window=30))


def test_what_a_query_is_like_counts_most() -> None:
    """Each query is 4 times the key at its own position, which outweighs all others."""
    call = Call.random((2, 2), 64, 300, 20, batch=1)
    call = call._replace(keys=Planes(*quantize_kv(torch.randn(1, 2, 300, 64))))
    call = call._replace(query=(4 * call.keys.dense()[:, :, 280:]).half())
    check(call)
    assert ((call.reference() - call.values.dense()[:, :, 280:]).abs() < call.budget()).all()


@pytest.mark.parametrize("read", ["kv8", "kv4"])
def test_extreme_codes_and_scales(read: str) -> None:
    call = Call.random((2, 1), 64, 129, 3, read=read)

    def extreme(entries: Planes) -> Planes:
        """Codes at the ends of their ranges; scales far apart, of which some are zero."""
        shape = *entries.scale.shape, 64
        coarse = torch.tensor([-8, -7, 7], dtype=torch.int8)[torch.randint(3, shape)]
        # No refinement goes below a base code of -8.
        fine = torch.where(torch.rand(shape) < 0.5, 7, torch.where(coarse == -8, 0, -8))
        refinement = pack_refinement(fine.to(torch.int8), 64)
        scale = torch.logspace(-6, 0, shape[2]).expand(shape[:3]).clone()
        scale[:, :, ::5] = 0
        return Planes(
            pack_base(coarse, 64), None if entries.refinement is None else refinement, scale
        )

    call = call._replace(keys=extreme(call.keys), values=extreme(call.values))
    check(call)
    check(call._replace(query=call.query * 0))
    tiny = call.values._replace(scale=call.values.scale * 1e-30)
    check(call._replace(query=call.query.float(), values=tiny))


def test_zero_values_and_zero_keys_are_safe() -> None:
    call = Call.random((2, 1), 64, 129, 3)
    nothing = call.values.map(torch.zeros_like)
    assert not call._replace(values=nothing).kernel().any()
    check(call._replace(keys=nothing))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_in_a_visible_slot_or_query_shows_and_elsewhere_does_not() -> None:
    call = Call.random((2, 1), 64, 300, 2, batch=1)
    for entries in (call.keys, call.values):
        entries.scale[0, 0, 299] = torch.nan
    out = call.kernel()
    assert not out[:, :, 0].isnan().any()
    assert out[:, :, 1].isnan().all()
    call.query[0, 1, 0, 3] = torch.nan
    assert call.kernel()[0, 1].isnan().all()
    assert not call.kernel()[0, 0, 0].isnan().any()


@pytest.mark.parametrize(
    ("heads", "head_dim", "slots", "window", "read"),
    [
        ((3, 1), 64, 530, 0, "kv8"),
        ((1, 1), 80, 300, 290, "kv4"),
        ((3, 1), 64, 300, 290, "recent"),
    ],
)
def test_no_division_of_the_work_changes_a_bit(
    heads: tuple[int, int],
    head_dim: int,
    slots: int,
    window: int,
    read: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Call.random(heads, head_dim, slots, 5, batch=1, read=read, window=window)
    out = call.kernel()
    for config in CONFIGS:
        assert torch.equal(call.kernel(config), out), config
    # Keys of the next split are loaded ahead where a program has several.
    monkeypatch.setattr(module, "FEW_SPLITS", 1)
    assert module._loads_ahead(AttentionConfig(8, 1), 2, 32, BOTH.value)
    assert torch.equal(call.kernel(AttentionConfig(8, 1)), out)


@pytest.mark.parametrize("read", ["kv8", "recent"])
def test_a_row_has_the_same_bits_alone_in_a_prompt_and_in_a_larger_cache(read: str) -> None:
    call = Call.random((3, 1), 64, 270, 20, read=read)
    prompt = call.kernel()

    def larger(plane: Tensor) -> Tensor:
        """More slots that nobody sees, of anything at all."""
        rest = torch.full((*plane.shape[:2], 300, *plane.shape[3:]), 0x5A, dtype=torch.uint8)
        rest = rest.to(plane.dtype) * (torch.nan if plane.is_floating_point() else 1)
        return torch.cat((plane, rest), 2)

    elsewhere = call._replace(keys=call.keys.map(larger), values=call.values.map(larger))
    for batch in range(2):
        for queries in (slice(19, 20), slice(11, 16), slice(2, 18)):
            part = elsewhere.select(slice(batch, batch + 1), queries)
            assert torch.equal(part.kernel(), prompt[batch : batch + 1, :, queries])


@pytest.mark.parametrize("read", ["kv4", "recent"])
@pytest.mark.parametrize(
    ("sink", "local", "window", "count"),
    [(4, 100, 0, 2), (0, 1, 0, 1), (300, 90, 0, 2), (4, 700, 560, 1), (2, 900, 0, 1)],
)
def test_sparse_drafts_see_the_sink_and_the_last_keys(
    sink: int, local: int, window: int, count: int, read: str
) -> None:
    call = Call.random((2, 1), 64, 800, count, read=read, window=window)
    call = call._replace(sink=sink, local=local)
    check(call)
    out = call.kernel()
    for config in CONFIGS[::2]:
        assert torch.equal(call.kernel(config), out), config
    alone = call.select(slice(0, 1), slice(count - 1, count))
    assert torch.equal(alone.kernel(), out[:1, :, -1:])
    if local > 800:
        assert torch.equal(out, call._replace(sink=0, local=0).kernel())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("config", CONFIGS)
def test_splits_in_the_hole_are_not_read(config: AttentionConfig) -> None:
    """NaN there shows wherever it is multiplied."""
    call = Call.random((2, 1), 64, 1500, 2, batch=1)._replace(sink=4, local=200)
    before = call.kernel(config)
    for entries in (call.keys, call.values):
        entries.scale[:, :, 256:1280] = torch.nan
    assert torch.equal(call.kernel(config), before)


def test_tiny_weights_do_not_show_where_they_are_merged() -> None:
    """Splits whose weights differ by more than float32 holds, and a value that only one has."""
    call = Call.random((1, 1), 64, 1000, 1, batch=1, read="kv4")
    call.keys.scale.copy_(torch.logspace(-3, 2, 1000)[None, None])
    call.values.base[..., 512:, 3] = 0
    outs = [call.kernel(config) for config in CONFIGS]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_the_draft_never_reads_the_refinement() -> None:
    call = Call.random((2, 1), 64, 300, 2, read="recent")
    before = call.kernel()
    for entries in (call.keys, call.values):
        assert entries.refinement is not None
        entries.refinement[0, :, : 298 - 7] ^= 0xFF
        entries.refinement[1] ^= 0xFF
    assert torch.equal(call.kernel()[0], before[0])
    assert not torch.equal(call.kernel()[1], before[1])


def test_a_strided_float32_query_is_read_in_place() -> None:
    call = Call.random((2, 1), 64, 129, 5)
    wide = call.query.float().transpose(1, 2).contiguous().transpose(1, 2)
    assert not wide.is_contiguous()
    out = call._replace(query=wide).kernel()
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out.half(), call.kernel())


def test_no_queries_give_no_rows() -> None:
    call = Call.random((2, 1), 64, 9, 3).select(slice(0, 2), slice(0, 0))
    assert call.kernel().shape == (2, 2, 0, 64)


def plain(call: Call, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention in float64 over dense keys and values."""
    scores = call.query.double() @ call.by_head(keys).mT * call.scaling
    weights = scores.masked_fill(~call.visible(), -torch.inf).softmax(-1).nan_to_num()
    return weights @ call.by_head(values)


@pytest.mark.parametrize(
    ("heads", "head_dim", "slots", "count", "window"),
    [((3, 1), 64, 129, 5, 0), ((2, 2), 80, 300, 2, 100), ((2, 1), 128, 129, 17, 0)],
)
@pytest.mark.parametrize(("sink", "local"), [(0, 0), (2, 40)])
def test_16_bit_keys_and_values(
    heads: tuple[int, int], head_dim: int, slots: int, count: int, window: int,
    sink: int, local: int,
) -> None:  # fmt: skip
    call = Call.random(heads, head_dim, slots, count, window=window)
    call = call._replace(sink=sink, local=local)
    keys, values = (entries.dense().half() for entries in (call.keys, call.values))

    def run(config: AttentionConfig | None) -> Tensor:
        operands = (x.to(device()) for x in (call.query, call.positions, keys, values))
        options = call.scaling, window, call.sink, call.local
        return attention_16(*operands, *options, config=config).cpu()

    out = run(None)
    assert ((out - plain(call, keys, values)).abs() <= call.budget()).all()
    assert all(torch.equal(run(config), out) for config in CONFIGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 2, 16)}, "H a multiple of H_kv"),
        ({"query": torch.zeros(1, 4, 2, 18)}, "query must be"),
        ({"query": torch.zeros(1, 4, 2, 16).double()}, "query must be float16"),
        ({"query": torch.zeros(1, 4, 16, 2).mT}, "contiguous along D"),
        ({"positions": torch.tensor([[0]])}, "positions must be int64 of shape"),
        ({"positions": torch.tensor([[0, 1]], device="meta")}, "positions must be on the device"),
        ({"key_scale": torch.zeros(1, 2, 8)}, "key scale must be"),
        ({"value_scale": torch.zeros(1, 9, 2).mT}, "value_scale must be contiguous"),
        ({"value_base": torch.zeros(1, 2, 9, 8)}, "value base must be"),
        ({"value_refinement": None}, "must both be given or both be None"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    entries = Planes(*quantize_kv(torch.randn(1, 2, 9, 16)))
    arguments = {
        "query": torch.zeros(1, 4, 2, 16),
        "positions": torch.tensor([[0, 1]]),
        **{f"key_{name}": plane for name, plane in entries._asdict().items()},
        **{f"value_{name}": plane for name, plane in entries._asdict().items()},
        "scaling": 0.25,
        "sliding_window": 0,
        "recent": 0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        nested_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(1, 2, 9, 16)}, "keys must be float16 or bfloat16"),
        ({"values": torch.zeros(1, 2, 9, 16)}, "values must have the dtype of keys"),
        ({"values": torch.zeros(1, 2, 8, 16).half()}, "values must have the shape of keys"),
        ({"query": torch.zeros(1, 4, 2, 18)}, "query must be"),
    ],
)
def test_16_bit_operands_that_do_not_fit_are_refused(
    change: dict[str, Tensor], message: str
) -> None:
    arguments = {
        "query": torch.zeros(1, 4, 2, 16),
        "positions": torch.tensor([[0, 1]]),
        "keys": torch.zeros(1, 2, 9, 16).half(),
        "values": torch.zeros(1, 2, 9, 16).half(),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        attention_16(**arguments, scaling=0.25, sliding_window=0)


def test_a_head_that_is_too_large_is_refused() -> None:
    entries = Planes(*quantize_kv(torch.randn(1, 1, 1, 258)))
    with pytest.raises(ValueError, match="at most 256, got 258"):
        nested_attention(
            torch.zeros(1, 1, 1, 258), torch.zeros(1, 1, dtype=torch.int64), *entries, *entries,
            0.25, 0, 0,
        )  # fmt: skip
