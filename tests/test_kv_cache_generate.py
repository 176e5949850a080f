"""`model.generate` with a nested cache, against a dense cache of the same dequantized entries."""

from typing import Any

import pytest
import small_models
import torch
from test_kv_cache import DequantizedCache
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache, cache_keyword

CASES = [(family, name) for family in small_models.FAMILIES for name in ("sdpa", "eager")]


def generate(model: PreTrainedModel, cache: Any, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(
        ids, max_new_tokens=12, do_sample=False, **{cache_keyword(model): cache}, **options
    )


@pytest.mark.parametrize(("family", "attention"), [*CASES, ("gemma2", "eager")])
def test_generates_what_the_dequantized_cache_does(family: str, attention: str) -> None:
    # Sliding windows of 8 are passed; the nested cache keeps what is behind them, masked.
    model = small_models.build(family)
    model.set_attn_implementation(attention)
    ids = small_models.tokens(model, batch=2, length=10)
    cache = NestedKVCache(model.config, 22, batch_size=2)

    out = generate(model, cache, ids, eos_token_id=[])
    expected = generate(model, DequantizedCache(), ids, eos_token_id=[])

    assert out.shape == (2, 22)
    assert torch.equal(out, expected)


def test_beams_are_rows_of_the_cache() -> None:
    model = small_models.build("llama-gqa")
    ids = small_models.tokens(model, batch=2, length=10)
    cache = NestedKVCache(model.config, 22, batch_size=6)

    out = generate(model, cache, ids, num_beams=3)

    assert torch.equal(out, generate(model, DequantizedCache(), ids, num_beams=3))


def test_a_cache_goes_on_where_a_first_call_ended() -> None:
    model = small_models.build("llama-gqa")
    ids = small_models.tokens(model, batch=1, length=10)
    cache, once = (NestedKVCache(model.config, 40) for _ in range(2))
    first = generate(model, cache, ids, eos_token_id=[])
    second = generate(model, cache, first, eos_token_id=[])

    assert torch.equal(second[:, :22], first)
    assert torch.equal(generate(model, once, first, eos_token_id=[]), second)


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "exact", "tolerance"),
    [
        # float64 but for cosines and sines; the logits are handed out in float32.
        ("sdpa", True, 2**-21),
        # Eager attention masks pads with -inf in float64, and NaN spreads from them in any cache.
        # In float32 two layers round to about 1e-6; one other code in the cache would show.
        ("eager", False, 1e-5),
    ],
)
def test_a_left_padded_row_is_the_prompt_alone_to_rounding(
    attention: str, exact: bool, tolerance: float
) -> None:
    model = small_models.build("llama-gqa")
    model = small_models.exact_(model) if exact else model
    model.set_attn_implementation(attention)
    ids = small_models.tokens(model, batch=3, length=12)
    lengths = [12, 7, 1]
    mask = torch.stack([torch.arange(12) >= 12 - length for length in lengths]).long()
    cache = NestedKVCache(model.config, 40, batch_size=3)
    options = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": []}

    batched = generate(model, cache, ids, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        prompt = ids[row : row + 1, -length:]
        alone = generate(model, NestedKVCache(model.config, 40), prompt, **options)
        assert torch.equal(batched.sequences[row, 12:], alone.sequences[0, length:])
        for ours, theirs in zip(batched.logits, alone.logits, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], rtol=0, atol=tolerance)
