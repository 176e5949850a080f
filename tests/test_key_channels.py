"""Unequal key channels are found during quantization, and saved."""

import logging
from pathlib import Path

import pytest
import qwen_like
import small_models
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import nestq
from nestq.architectures import describe
from nestq.hf_quantizer import NestedConfig
from nestq.key_channels import UNEVEN, KeyChannels, measure_key_channels
from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.speculative import speculative_generate

CPU = torch.device("cpu")
RECIPE = nestq.bitnest_w4w8(group_size=32)


@torch.no_grad()
def oracle(model: PreTrainedModel, windows: Tensor) -> list[Tensor]:
    """Root mean squares of the keys in an ordinary cache."""
    cache = DynamicCache()
    model(windows, use_cache=True, **{cache_keyword(model): cache})
    return [layer.keys.double().square().mean((0, 2)).sqrt() for layer in cache.layers]


@pytest.mark.parametrize("family", [*small_models.FAMILIES, "gemma2"])
def test_keys_are_measured_after_rotary_embeddings(family: str) -> None:
    model = small_models.build(family)
    windows = small_models.tokens(model, batch=5, length=24)
    found = measure_key_channels(describe(model), windows, 2, CPU)
    # Sums of 120 squares in float32, and batches of a model in float32.
    for ours, theirs in zip(found.rms, oracle(model, windows), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_a_channel_is_compared_with_the_median_of_its_head() -> None:
    rms = torch.ones(2, 8)
    rms[0], rms[1, 3] = 10, 3.5
    found = KeyChannels([rms, torch.ones(2, 8)])
    assert found.unevenness == [3.5, 1.0]
    assert not found.need_rotation
    assert found.notes() == []
    rms[1, 3] = UNEVEN + 0.5
    assert found.need_rotation
    assert f"in layer 0 a key channel is {UNEVEN + 0.5:.1f} times the median" in found.notes()[0]


def test_channels_of_zeros_are_even() -> None:
    assert not KeyChannels([torch.zeros(2, 8)]).need_rotation


def quantized(model: PreTrainedModel) -> nestq.QuantizationReport:
    windows = small_models.tokens(model, 8, 32)
    return nestq.quantize_(model, RECIPE, calibration=windows, progress=False)


def test_quantizing_finds_large_channels_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = qwen_like.build(num_hidden_layers=1, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    with caplog.at_level(logging.INFO, logger="nestq"):
        report = quantized(model)
    (note,) = [note for note in report.notes if "key channel" in note]
    assert note in caplog.text
    assert model.config.quantization_config.rotate_keys

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.quantization_config.rotate_keys
    assert NestedKVCache(loaded.config, 4).rotate_keys
    assert not NestedKVCache(loaded.config, 4, rotate_keys=False).rotate_keys

    ids = small_models.tokens(model, 1, 8)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "kv": "kv4/kv8"}
    outputs = [speculative_generate(one, ids, gamma=2, **options) for one in (model, loaded)]
    for output in outputs:
        assert output["cache" if "cache" in output else "past_key_values"].rotate_keys
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)


def test_ordinary_models_are_left_alone(tmp_path: Path) -> None:
    model = small_models.build("llama-gqa", num_hidden_layers=1)
    report = quantized(model)
    assert not any("key channel" in note for note in report.notes)
    assert not NestedKVCache(model.config, 4).rotate_keys
    # Files of such models are those that earlier versions read.
    assert "rotate_keys" not in model.config.quantization_config.to_dict()


def test_a_configuration_says_true_or_false() -> None:
    model = small_models.build("llama-gqa", num_hidden_layers=1)
    quantized(model)
    entries = model.config.quantization_config.to_dict()
    with pytest.raises(ValueError, match="rotate_keys must be true or false, got 'yes'"):
        NestedConfig.from_dict(entries | {"rotate_keys": "yes"})
