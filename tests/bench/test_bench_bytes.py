"""Bytes that a step reads, counted by hand."""

import pytest
import small_models
import torch
from nested_models import nest_

from nestq.bench.bytes_read import dense_kv_bytes, nested_kv_bytes, weight_bytes
from nestq.bench.measure import Case, step_bytes
from nestq.kv_policy import WHOLE, KVRead

# The small Llama: hidden 48, 4 heads of 16, 2 of keys, MLP of 100, 97 tokens, 2 layers. Rows and
# columns of its linears:
LAYER = [(64, 48), (32, 48), (32, 48), (48, 64), (100, 48), (100, 48), (48, 100)]
HEAD = (97, 48)
NORMS = (2 * 2 + 1) * 48


def nested_bytes(planes: int) -> int:
    """Groups of 32: a row of K has ceil(K / 32) groups, of 16 bytes a plane and a 16-bit scale."""
    shapes = [*LAYER, *LAYER, HEAD]
    return sum(rows * -(-columns // 32) * (16 * planes + 2) for rows, columns in shapes) + 2 * NORMS


def test_weights_of_a_nested_model() -> None:
    model = nest_(small_models.build("llama-gqa", dtype=torch.bfloat16))
    assert weight_bytes(model, "draft") == nested_bytes(1)
    assert weight_bytes(model, "target") == nested_bytes(2)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_dense_model(tied: bool) -> None:
    """The embedding is read by the row, unless it is the head, too."""
    model = small_models.build("llama-gqa", tied=tied, dtype=torch.bfloat16)
    shapes = [*LAYER, *LAYER, HEAD]
    expected = 2 * (sum(rows * columns for rows, columns in shapes) + NORMS)
    assert weight_bytes(model, "target") == expected


def test_biases_are_weights() -> None:
    with_biases = small_models.build("qwen2", dtype=torch.bfloat16)
    without = small_models.build("llama-gqa", dtype=torch.bfloat16)
    biases = 2 * (64 + 32 + 32)
    assert weight_bytes(with_biases, "target") == weight_bytes(without, "target") + 2 * biases


@pytest.mark.parametrize(
    ("read", "bytes_a_vector"),
    [(WHOLE, 4 + 16), (KVRead(refinement=False), 4 + 8)],
)
def test_a_nested_cache(read: KVRead, bytes_a_vector: int) -> None:
    config = small_models.build("llama-gqa").config
    # Keys and values, 2 layers, 3 rows, 2 heads, 10 positions.
    assert nested_kv_bytes(config, 10, 3, read) == 2 * 2 * 3 * 2 * 10 * bytes_a_vector


def test_recent_entries_and_windows() -> None:
    llama, mistral = (small_models.build(family).config for family in ("llama-gqa", "mistral"))
    recent = KVRead(refinement=True, recent=4)
    assert nested_kv_bytes(llama, 10, 1, recent) == 2 * 2 * 2 * (10 * (4 + 8) + 4 * 8)
    assert nested_kv_bytes(llama, 3, 1, recent) == nested_kv_bytes(llama, 3, 1, WHOLE)
    # A window of 8.
    assert nested_kv_bytes(mistral, 10, 1, WHOLE) == nested_kv_bytes(llama, 8, 1, WHOLE)
    assert dense_kv_bytes(mistral, 10, 1, torch.bfloat16) == 2 * 2 * 2 * 8 * 16 * 2


def test_a_step() -> None:
    """What a step writes is read by its own queries, too."""
    model = nest_(small_models.build("llama-gqa", dtype=torch.bfloat16))
    case = Case("speculative", context=10, batch=1, gamma=4, kv="kv4/kv8")
    assert step_bytes(model, case, "draft", 1) == nested_bytes(1) + 2 * 2 * 2 * 11 * (4 + 8)
    assert step_bytes(model, case, "target", 5) == nested_bytes(2) + 2 * 2 * 2 * 15 * (4 + 16)
    dense = small_models.build("llama-gqa", dtype=torch.bfloat16)
    kv = 2 * 2 * 2 * 11 * 16 * 2
    assert step_bytes(dense, Case("16-bit", 10, 1), "target", 1) == kv + weight_bytes(
        dense, "target"
    )
