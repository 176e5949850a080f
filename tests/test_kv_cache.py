"""The cache as transformers uses it: appended, read dense, cropped, reordered."""

from typing import Any

import pytest
import small_models
import torch
from torch import Tensor
from transformers import DynamicCache

from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.reference.kv import dequantize_kv, quantize_kv
from nestq.view import nest_view

MODEL = small_models.build("llama-gqa")
CONFIG = MODEL.config
HEADS, HEAD_DIM = CONFIG.num_key_value_heads, CONFIG.head_dim


def nearest(states: Tensor, view: str = "target") -> Tensor:
    base, refinement, scale = quantize_kv(states)
    return dequantize_kv(base, refinement if view == "target" else None, scale, states.dtype)


class DequantizedCache(DynamicCache):
    """The oracle: a dense cache of what the nested one reads in the target view."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(nearest(key_states), nearest(value_states), *args, **kwargs)


def states(count: int, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, count, HEAD_DIM, generator=generator).to(dtype)


def both(batch: int = 2) -> tuple[NestedKVCache, DequantizedCache]:
    return NestedKVCache(CONFIG, 32, batch_size=batch), DequantizedCache()


def append(cache: Any, count: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Append to both layers; returns the last one's keys and values."""
    keys, values = states(count, batch, seed), states(count, batch, seed + 1)
    cache.update(values, keys, 0)
    return cache.update(keys, values, 1)


def assert_same_reads(cache: NestedKVCache, oracle: DequantizedCache, batch: int = 2) -> None:
    """What the next update reads is bitwise the same, and so are lengths and masks."""
    assert cache.get_seq_length() == oracle.get_seq_length()
    assert cache.get_mask_sizes(3, 0) == oracle.get_mask_sizes(3, 0)
    for ours, theirs in zip(append(cache, 1, batch, 50), append(oracle, 1, batch, 50), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("blocks", [[1], [7], [5, 1, 1, 3], [1] * 6])
def test_update_returns_everything_so_far_dequantized(blocks: list[int]) -> None:
    cache, oracle = both()
    for i, count in enumerate(blocks):
        ours, theirs = append(cache, count, seed=i), append(oracle, count, seed=i)
        assert all(map(torch.equal, ours, theirs))
    assert_same_reads(cache, oracle)


def test_blocks_and_single_steps_leave_the_same_bytes() -> None:
    caches = [NestedKVCache(CONFIG, 16, batch_size=2) for _ in range(2)]
    keys, values = states(12), states(12, seed=1)
    for cache, count in zip(caches, (1, 4), strict=True):
        for span in torch.arange(12).split(count):
            cache.update(keys[:, :, span], values[:, :, span], 0)

    for planes in ("key_planes", "value_planes"):
        one, other = (getattr(cache.layers[0], planes) for cache in caches)
        for name in ("base", "refinement", "scale"):
            assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("policy", "drafts_as"),
    [
        ("kv8/kv8", "tttttttt"),
        ("kv4/kv8", "dddddddd"),
        ("recent(3)", "dddddttt"),
        ("recent(9)", "tttttttt"),
        ("auto(8)", "tttttttt"),
        ("auto(7)", "dddddddd"),
    ],
)
def test_views_read_what_the_policy_says(policy: str, drafts_as: str) -> None:
    x = states(8)
    target, draft = nearest(x), nearest(x, "draft")
    for view, expected in (("target", "tttttttt"), ("draft", drafts_as)):
        cache = NestedKVCache(CONFIG, 8, batch_size=2, policy=policy)
        with nest_view(view):
            keys, values = cache.update(x, x, 0)
        for slot, plane in enumerate(expected):
            whole = target if plane == "t" else draft
            assert torch.equal(keys[:, :, slot], whole[:, :, slot])
        assert torch.equal(values, keys)


def test_a_kv4_draft_never_sees_the_refinement() -> None:
    reads = []
    for poison in (0x00, 0xFF):
        cache = NestedKVCache(CONFIG, 8, batch_size=2, policy="kv4/kv8")
        append(cache, 5)
        for layer in cache.layers:
            layer.key_planes.refinement ^= poison
            layer.value_planes.refinement ^= poison
        with nest_view("draft"):
            reads.append(append(cache, 1, seed=9))
    assert all(map(torch.equal, *reads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dense_reads_have_the_dtype_of_the_states(dtype: torch.dtype) -> None:
    x = states(4, dtype=dtype)
    keys, values = NestedKVCache(CONFIG, 8, batch_size=2).update(x, x, 0)

    assert keys.dtype == values.dtype == dtype
    assert torch.equal(keys, nearest(x))


@pytest.mark.parametrize("removed", [0, 1, 4, 9])
def test_crop_forgets_the_last_positions(removed: int) -> None:
    cache, oracle = both()
    for c in (cache, oracle):
        append(c, 9)
        c.crop(-removed)
    assert_same_reads(cache, oracle)


def test_crop_of_more_than_there_is_forgets_everything() -> None:
    cache, _ = both()
    append(cache, 3)
    cache.crop(-5)

    assert cache.get_seq_length() == 0
    assert cache.is_croppable


def test_crop_to_a_positive_length_is_refused() -> None:
    cache, _ = both()
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative"):
        cache.crop(3)


def test_reset_forgets_in_place() -> None:
    cache, _ = both()
    append(cache, 5)
    cache.lengths.fill_(5)
    addresses = [layer.key_planes.base.data_ptr() for layer in cache.layers]
    cache.reset()

    assert_same_reads(cache, DequantizedCache())
    assert cache.lengths.tolist() == [0, 0]
    assert [layer.key_planes.base.data_ptr() for layer in cache.layers] == addresses


def test_reorder_moves_rows_in_place() -> None:
    cache, oracle = both(batch=3)
    for c in (cache, oracle):
        append(c, 5, batch=3)
    cache.lengths.copy_(torch.tensor([1, 2, 3]))
    address = cache.layers[1].value_planes.scale.data_ptr()
    for c in (cache, oracle):
        c.reorder_cache(torch.tensor([2, 2, 0]))

    assert_same_reads(cache, oracle, batch=3)
    assert cache.lengths.tolist() == [3, 3, 1]
    assert cache.layers[1].value_planes.scale.data_ptr() == address


def test_batch_operations_repeat_and_select_rows() -> None:
    cache, oracle = both()
    for c in (cache, oracle):
        append(c, 5)
        c.batch_repeat_interleave(3)
    cache.lengths.copy_(torch.arange(6))
    for c in (cache, oracle):
        c.batch_select_indices(torch.tensor([0, 4, 5]))

    assert cache.batch_size == 3
    assert cache.lengths.tolist() == [0, 4, 5]
    assert_same_reads(cache, oracle, batch=3)


def test_offload_and_prefetch_keep_every_byte() -> None:
    cache, oracle = both()
    for c in (cache, oracle):
        append(c, 5)
    cache.offload(0)
    cache.layers[0].prefetch()
    assert_same_reads(cache, oracle)


def test_offload_and_prefetch_move_every_plane() -> None:
    layer = NestedKVCache(CONFIG, 4, device="meta").layers[0]
    layer.key_planes.replace(lambda plane: torch.zeros_like(plane, device="cpu"))
    layer.value_planes.replace(lambda plane: torch.zeros_like(plane, device="cpu"))
    layer.prefetch()
    for planes in (layer.key_planes, layer.value_planes):
        assert {planes.base.device, planes.refinement.device, planes.scale.device} == {layer.device}


def test_everything_is_allocated_at_construction() -> None:
    cache = NestedKVCache(CONFIG, 20, batch_size=3)

    assert len(cache) == CONFIG.num_hidden_layers
    assert cache.is_initialized
    assert (cache.get_max_length(), cache.get_seq_length(), cache.batch_size) == (20, 0, 3)
    assert cache.lengths.dtype == torch.int64
    for layer in cache.layers:
        for planes in (layer.key_planes, layer.value_planes):
            assert planes.base.shape == planes.refinement.shape == (3, HEADS, 20, HEAD_DIM // 2)
            assert planes.scale.shape == (3, HEADS, 20)


def test_too_many_positions_are_refused_by_name_and_change_nothing() -> None:
    cache = NestedKVCache(CONFIG, 8, batch_size=2)
    append(cache, 6)
    with pytest.raises(ValueError, match=r"holds 8 positions and 9 are needed: .* max_length"):
        append(cache, 3)
    assert cache.get_seq_length() == 6


def test_another_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 2, got 3"):
        append(NestedKVCache(CONFIG, 8, batch_size=2), 1, batch=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length must be an int of at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be an int of at least 1, got 1.5"),
        ({"policy": "kv2"}, "KV policy must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NestedKVCache(CONFIG, **{"max_length": 8, **options})


def test_layers_without_plain_attention_are_refused() -> None:
    config = small_models.build("llama-gqa").config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"got \['linear_attention'\]"):
        NestedKVCache(config, 8)


def test_an_odd_head_size_is_refused() -> None:
    config = small_models.build("llama-gqa").config
    config.head_dim = 15
    with pytest.raises(ValueError, match="even head size, got 15"):
        NestedKVCache(config, 8)


def test_cache_keyword_is_what_the_forward_takes() -> None:
    class Old(torch.nn.Module):
        def forward(self, input_ids: Tensor, past_key_values: Any = None) -> None: ...

    assert cache_keyword(Old()) == "past_key_values"
    assert cache_keyword(torch.compile(MODEL)) == cache_keyword(MODEL)
    with torch.no_grad():
        cache = NestedKVCache(CONFIG, 8)
        MODEL(torch.tensor([[1, 2, 3]]), use_cache=True, **{cache_keyword(MODEL): cache})
    assert cache.get_seq_length() == 3
    with pytest.raises(ValueError, match="must take 'cache' or 'past_key_values'"):
        cache_keyword(torch.nn.Linear(2, 2))
