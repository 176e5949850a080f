"""Images in the prompt of a nested language model, and the vision tower left alone."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal_models import IMAGE_TOKEN, build_llava, image_prompts
from nested_models import assert_same_model
from speculative_runs import run
from torch import nn
from transformers import LlavaForConditionalGeneration, PreTrainedModel

from nestq import bitnest_w4w8, quantize_, save
from nestq.speculative import decode, speculative_generate
from nestq.tensor import NestedQuantTensor

RECIPE = bitnest_w4w8(group_size=32, rotation="none")


@cache
def nested_llava() -> PreTrainedModel:
    model = build_llava()
    with pytest.warns(UserWarning, match="no calibration was given"):
        quantize_(model, RECIPE, progress=False)
    return model


def test_the_language_model_alone_is_nested() -> None:
    linears = {n: m for n, m in nested_llava().named_modules() if isinstance(m, nn.Linear)}
    nested = {n for n, m in linears.items() if isinstance(m.weight, NestedQuantTensor)}
    language = {n for n in linears if n.startswith("model.language_model.")} | {"lm_head"}
    assert nested == language
    assert len(nested) == 15
    assert len(linears) > len(nested)


def test_the_head_may_be_left_out() -> None:
    model = build_llava()
    recipe = bitnest_w4w8(group_size=32, rotation="none", quantize_head=False)
    with pytest.warns(UserWarning, match="no calibration was given"):
        report = quantize_(model, recipe, progress=False)
    assert len(report.linears) == 14
    assert type(model.lm_head.weight) is nn.Parameter


def test_a_rotation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r'LlavaForConditionalGeneration .* rotation="none"'):
        quantize_(build_llava(), bitnest_w4w8(), progress=False)


@pytest.mark.parametrize("do_sample", [False, True])
def test_images(do_sample: bool) -> None:
    model = nested_llava()
    tokens, pixels = image_prompts()
    options: dict[str, Any] = {"do_sample": do_sample, "seed": 5} if do_sample else {}
    expected = run(model, tokens, 0, pixel_values=pixels, **options)
    assert not torch.equal(
        expected.sequences, run(model, tokens, 0, pixel_values=pixels.flip(0), **options).sequences
    )
    for gamma in (2, 4):
        output = run(model, tokens, gamma, pixel_values=pixels, **options)
        if not do_sample:
            assert torch.equal(output.sequences, expected.sequences)
        assert torch.equal(output.sequences[:, :10], tokens)
        assert 0 < output.metrics.accepted < output.metrics.drafted
        assert output.metrics.tokens == 32
        theirs = model.generate(
            tokens,
            pixel_values=pixels,
            custom_generate=decode,
            gamma=gamma,
            max_new_tokens=16,
            **options,
        )
        assert torch.equal(theirs, output.sequences)


def test_images_of_padded_rows() -> None:
    model = nested_llava()
    tokens, pixels = image_prompts()
    expected = [
        run(model, tokens[:1], 0, pixel_values=pixels[:1]).sequences[0],
        run(model, tokens[1:, 1:], 0, pixel_values=pixels[1:]).sequences[0],
    ]
    mask = torch.ones_like(tokens)
    mask[1, 0] = 0
    output = run(model, tokens, 3, pixel_values=pixels, attention_mask=mask).sequences
    assert torch.equal(output[0], expected[0])
    assert torch.equal(output[1, 1:], expected[1])


def test_a_second_turn_needs_no_image() -> None:
    """The cache has it."""
    model = nested_llava()
    tokens, pixels = image_prompts(1)
    first = run(model, tokens, 3, pixel_values=pixels, max_new_tokens=5)
    turn = torch.cat((first.sequences, torch.tensor([[7, 8, 9]])), 1)
    expected = run(model, turn, 0, pixel_values=pixels).sequences
    output = run(model, turn, 3, cache=first.cache)
    assert torch.equal(output.sequences, expected)
    with pytest.raises(ValueError, match=r"cache must be empty where .* images are given"):
        run(model, turn, 3, cache=first.cache, pixel_values=pixels)


def test_text_alone() -> None:
    model = nested_llava()
    tokens = image_prompts()[0].masked_fill(image_prompts()[0] == IMAGE_TOKEN, 5)
    expected = run(model, tokens, 0).sequences
    assert torch.equal(run(model, tokens, 3).sequences, expected)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    save(nested_llava(), tmp_path / "llava")
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    assert_same_model(loaded, nested_llava())
    tokens, pixels = image_prompts()
    expected = run(nested_llava(), tokens, 2, pixel_values=pixels).sequences
    assert torch.equal(run(loaded, tokens, 2, pixel_values=pixels).sequences, expected)


def test_what_cannot_be() -> None:
    model = nested_llava()
    tokens, pixels = image_prompts()
    with pytest.raises(ValueError, match="prefill_chunk_size=4 is not supported with images"):
        speculative_generate(model, tokens, pixel_values=pixels, prefill_chunk_size=4)
