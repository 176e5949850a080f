"""A call whose drafts are rejected because of uneven keys says what to do."""

import warnings
from functools import cache
from typing import Any

import pytest
import qwen_like
import small_models
import torch
from speculative_runs import run
from transformers import PreTrainedModel

from nestq.key_channels import cached_key_channels
from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.reference.kv import dequantize_kv
from nestq.speculative import SpeculativeOutput, key_warning

MESSAGE = r"of the draft tokens were rejected, and drafts read 4-bit keys of which a channel is"


@cache
def model(factor: float = qwen_like.FACTOR) -> PreTrainedModel:
    made = qwen_like.build(factor=factor)
    made.generation_config.eos_token_id = None
    return made


def decode(model: PreTrainedModel, kv: str, rotate_keys: bool | None = None) -> SpeculativeOutput:
    options: dict[str, Any] = {"kv": kv}
    if rotate_keys is not None:
        given = NestedKVCache(model.config, 120, policy=kv, rotate_keys=rotate_keys)
        options = {cache_keyword(model): given}
    return run(model, small_models.tokens(model, 1, 40), 4, max_new_tokens=60, **options)


@pytest.fixture(autouse=True)
def _any_rejection_is_a_collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many drafts a random model accepts is not what is tested here."""
    monkeypatch.setattr(key_warning, "COLLAPSED", 1.0)


@pytest.mark.parametrize("kv", ["kv4/kv8", "auto(20)"])
def test_rejected_drafts_of_4_bit_keys_are_explained(kv: str) -> None:
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        output = decode(model(), kv)
    assert len([one for one in caught if "draft tokens" in str(one.message)]) == 1
    assert output.metrics.slot_acceptance < 1
    assert f"{1 - output.metrics.slot_acceptance:.0%}" in str(caught[0].message)


@pytest.mark.parametrize(
    ("factor", "kv", "rotate_keys"),
    [
        (qwen_like.FACTOR, "kv4/kv8", True),
        (qwen_like.FACTOR, "recent(4)", None),
        (0, "kv4/kv8", None),
    ],
)
def test_other_rejections_are_not(factor: float, kv: str, rotate_keys: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = decode(model(factor), kv, rotate_keys)
    assert output.metrics.slot_acceptance < 1


def test_few_rejections_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_warning, "COLLAPSED", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(model(), "kv4/kv8")


@pytest.mark.filterwarnings("ignore:.*of the draft tokens were rejected")
def test_cached_keys_are_measured() -> None:
    output = decode(model(), "kv4/kv8", rotate_keys=False)
    cached = output["cache" if "cache" in output else "past_key_values"]
    keys = cached.layers[1].key_planes
    length = int(cached.lengths[0])
    assert 90 < length < 120
    codes = keys.base[0, :, :length], keys.refinement[0, :, :length], keys.scale[0, :, :length]
    expected = dequantize_kv(*codes, torch.float64).square().mean(1).sqrt()
    found = cached_key_channels(cached).rms[1]
    # Float32 products of codes and scales, and their squares.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
