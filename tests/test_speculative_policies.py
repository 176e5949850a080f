"""Dense models in the engine, with every storage and draft of the cache: the tokens of gamma 0."""

import copy
import re
from functools import cache
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import cache_of, nested_model, padded_prompts, run
from torch import Tensor
from transformers import PreTrainedModel

from nestq.dense_kv_cache import DenseKVCache
from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.kv_policy import KVPolicy
from nestq.layer_skipping import skip_in_draft_
from nestq.speculative import SpeculativeOutput
from nestq.view import current_view

WIDTH = 12
NEW = 7
LONG = 44  # more than the smallest budget of SnapKV
# Drafts that differ from the target whatever the weights are.
DRAFTS = {
    "kv4/kv8": WIDTH,
    "recent(5)": WIDTH,
    "auto(13)": WIDTH,
    "quantspec": WIDTH,
    "16/16+streaming(2,4)": WIDTH,
    "kv4/kv8+streaming(2,4)": WIDTH,
    "kv4/kv4+streaming(0,1)": WIDTH,
    "16/16+snapkv(35)": LONG,
    "kv8/kv8+snapkv(40)": LONG,
}


@cache
def dense_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = small_models.build(
        "llama-gqa", dtype=dtype, num_hidden_layers=1, head_dim=32, intermediate_size=48
    )
    model.generation_config.eos_token_id = None
    return model


def decode(model: PreTrainedModel, gamma: int, kv: str, **options: Any) -> SpeculativeOutput:
    """One row or, with ``batch=3``, left-padded ones."""
    pads = [0, 3, 11][: options.pop("batch", 1)]
    tokens, mask = padded_prompts(model, pads, options.pop("width", WIDTH))
    options = {"max_new_tokens": NEW, "output_logits": True, "attention_mask": mask, **options}
    return run(model, tokens, gamma, kv=kv, **options)


def assert_same(one: SpeculativeOutput, other: SpeculativeOutput) -> None:
    """Tokens and the target's logits, bit for bit."""
    assert torch.equal(one.sequences, other.sequences)
    assert all(map(torch.equal, one.logits, other.logits))


@pytest.mark.parametrize("kv", DRAFTS)
@pytest.mark.parametrize(
    ("dtype", "batch", "gammas"),
    [
        (torch.float32, 1, (1, 2, 3, 4, 5)),
        (torch.float64, 3, (3,)),
        (torch.bfloat16, 3, (4,)),
        *(
            pytest.param(dtype, batch, (1, 2, 3, 4, 5), marks=pytest.mark.full)
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
            for batch in (1, 3)
        ),
    ],
)
def test_a_dense_model_drafts_with_its_cache_alone(
    kv: str, dtype: torch.dtype, batch: int, gammas: tuple[int, ...]
) -> None:
    model = dense_model(dtype)
    options: dict[str, Any] = {"batch": batch, "width": DRAFTS[kv]}
    alone = decode(model, 0, kv, **options)
    for gamma in gammas:
        assert_same(decode(model, gamma, kv, **options), alone)


@pytest.mark.parametrize("kv", ["16/16", "kv4/kv4", "16/16+streaming(2,4)", "kv4/kv4+snapkv(34)"])
def test_a_nested_model_decodes_with_every_storage(kv: str) -> None:
    model = nested_model()
    options: dict[str, Any] = {"batch": 3, "width": LONG if "snapkv" in kv else WIDTH}
    assert_same(decode(model, 4, kv, **options), decode(model, 0, kv, **options))


@pytest.mark.parametrize("kv", ["16/16", "kv4/kv4", "kv8/kv8"])
@pytest.mark.parametrize("skipped", [([0], []), ([], [0])])
def test_a_dense_model_drafts_with_skipped_layers(skipped: Any, kv: str) -> None:
    model = copy.deepcopy(dense_model())
    alone = decode(model, 0, kv, batch=3)
    with pytest.raises(ValueError, match="gamma must be 0"):
        decode(model, 3, kv, batch=3)
    skip_in_draft_(model, *skipped)
    assert_same(decode(model, 3, kv, batch=3), alone)


def test_a_target_of_four_bits_reads_the_base_alone() -> None:
    four, eight, sixteen = (
        decode(dense_model(), 0, kv).logits[1] for kv in ("kv4/kv4", "kv8/kv8", "16/16")
    )
    far, near = (float((logits - sixteen).abs().max()) for logits in (four, eight))
    assert near < far / 4  # its steps are sixteen times finer
    assert far > 0.01


@pytest.mark.parametrize("kv", ["kv4/kv8", "16/16+streaming(1,2)"])
def test_drafts_that_read_less_are_rejected_now_and_then(kv: str) -> None:
    """So that equality says something."""
    tokens = small_models.tokens(dense_model(), 2, WIDTH)
    metrics = run(dense_model(), tokens, 4, kv=kv, max_new_tokens=16).metrics
    assert metrics is not None
    accepted, drafted = sum(metrics.accepted_per_position), sum(metrics.drafted_per_position)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("sparse", "full", "width"),
    [
        ("16/16+streaming(0,60)", "16/16", WIDTH),
        ("kv4/kv8+streaming(60,1)", "kv4/kv8", WIDTH),
        ("16/16+snapkv(60)", "16/16", LONG),
        ("kv4/kv8+snapkv(44)", "kv4/kv8", LONG),
        ("recent(5)+snapkv(44)", "recent(5)", LONG),
    ],
)
def test_a_budget_of_the_context_drafts_as_without(sparse: str, full: str, width: int) -> None:
    """Every logit of every draft, bit for bit."""
    one, other = (draft_logits(kv, width) for kv in (sparse, full))
    assert len(one) == len(other) > 0
    assert all(map(torch.equal, one, other))
    fewer = draft_logits(re.sub(r"\(.*", "(0,3)" if "stream" in sparse else "(34)", sparse), width)
    assert not torch.equal(fewer[0], one[0])


def draft_logits(kv: str, width: int) -> list[Tensor]:
    """Of every draft step of three rows."""
    logits: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        if current_view() == "draft":
            logits.append(output.logits)

    hook = nested_model().register_forward_hook(keep)
    decode(nested_model(), 3, kv, batch=3, width=width)
    hook.remove()
    return logits


@pytest.mark.parametrize("kv", ["16/16+streaming(2,4)", "kv8/kv8+snapkv(34)", "16/16+snapkv(34)"])
def test_samples_of_a_row_do_not_depend_on_others_or_chunks(kv: str) -> None:
    """What a draft reads of a row depends on the row alone: so do the samples."""
    model = nested_model()
    pads = [0, 5, 30]
    tokens, mask = padded_prompts(model, pads, LONG)
    sampled: dict[str, Any] = {"do_sample": True, "kv": kv, "max_new_tokens": 8}
    batch: dict[str, Any] = {"seed": [7, 8, 9], "attention_mask": mask, **sampled}
    rows = run(model, tokens, 3, **batch).sequences
    assert torch.equal(run(model, tokens, 3, prefill_chunk_size=7, **batch).sequences, rows)
    for row, count in enumerate(pads):
        alone = run(model, tokens[row : row + 1, count:], 3, seed=[7 + row], **sampled)
        assert torch.equal(alone.sequences[0], rows[row, count:])


@pytest.mark.parametrize("kv", ["16/16", "16/16+streaming(2,4)", "kv4/kv4"])
def test_a_cache_is_continued(kv: str) -> None:
    model = nested_model()
    first = run(model, small_models.tokens(model, 2, 6), 3, kv=kv)
    cache = cache_of(first)
    assert type(cache) is (DenseKVCache if "16" in kv else NestedKVCache)
    assert cache.policy == KVPolicy.parse(kv)
    more = small_models.tokens(model, 2, 30, seed=4)
    ids = torch.cat((first.sequences, more), 1)
    expected = run(model, ids, 0, kv=kv).sequences
    given: dict[str, Any] = {cache_keyword(model): cache}
    output = run(model, ids, 3, **given)  # it grows
    assert torch.equal(output.sequences, expected)
    cache.lengths.fill_(20)  # rolled back
    assert torch.equal(run(model, ids, 2, **given).sequences, expected)
    with pytest.raises(ValueError, match=f"be that of the cache, '{re.escape(kv)}', got 'kv8/kv8'"):
        run(model, ids, 2, kv="kv8/kv8", **given)
    cache.reset()
    assert torch.equal(run(model, ids, 2, **given).sequences, expected)


def test_a_snapkv_cache_is_used_again_but_not_continued() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 2, LONG)
    first = run(model, tokens, 3, kv="16/16+snapkv(34)")
    cache = cache_of(first)
    given: dict[str, Any] = {cache_keyword(model): cache}
    with pytest.raises(ValueError, match="cache must be empty, got a SnapKVCache in use"):
        run(model, torch.cat((first.sequences, tokens), 1), 3, **given)
    cache.reset()
    with pytest.raises(ValueError, match="cache must have max_length of at least"):
        run(model, tokens, 3, max_new_tokens=60, **given)
    assert torch.equal(run(model, tokens, 3, **given).sequences, first.sequences)


def test_a_snapkv_cache_without_room_for_drafts_is_refused() -> None:
    model = nested_model()
    cache = cache_of(run(model, small_models.tokens(model, 1, 90), 3, kv="16/16+snapkv(34)"))
    cache.reset()
    given: dict[str, Any] = {cache_keyword(model): cache}
    with pytest.raises(ValueError, match="room for 34 positions of a prompt and 55 after it"):
        run(model, small_models.tokens(model, 1, 13), 3, max_new_tokens=50, **given)


def test_a_prompt_of_embeddings() -> None:
    model: Any = nested_model()
    embeddings = model.get_input_embeddings()(small_models.tokens(model, 2, LONG)).detach()
    options: dict[str, Any] = {"inputs_embeds": embeddings, "kv": "kv4/kv8+snapkv(34)"}
    outputs = [run(model, None, gamma, **options) for gamma in (0, 3)]  # type: ignore[arg-type]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)


@pytest.mark.parametrize("kv", ["16/16+streaming(2,4)", "kv8/kv8+streaming(2,4)"])
def test_sliding_windows(kv: str) -> None:
    model = nested_model("mistral")  # a window of 8
    assert_same(decode(model, 3, kv, batch=3), decode(model, 0, kv, batch=3))
    with pytest.raises(ValueError, match=r"not supported for a model with sliding windows"):
        decode(model, 3, "16/16+snapkv(40)")
