"""Speculative decoding gives the tokens, and the logits, that the target gives alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import NEW, PAD, cache_of, nested_model, padded_prompts, run
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.kv_policy import KVPolicy
from nestq.speculative import decode, speculative_generate
from nestq.speculative.selection import GreedySelection
from nestq.view import current_view


@contextmanager
def record_logits(model: PreTrainedModel) -> Iterator[dict[tuple[int, int], Tensor]]:
    """The target's logits by row and position; a position verified again counts once, the last."""
    logits: dict[tuple[int, int], Tensor] = {}

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if current_view() == "target":
            positions = kwargs["position_ids"][:, -output.logits.shape[1] :]
            for row, columns in enumerate(positions.tolist()):
                logits.update({(row, p): output.logits[row, i] for i, p in enumerate(columns)})

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield logits
    finally:
        handle.remove()


def assert_same_logits(
    ours: dict[tuple[int, int], Tensor],
    theirs: dict[tuple[int, int], Tensor],
    row: int,
    other_row: int,
    positions: range,
) -> None:
    for position in positions:
        assert torch.equal(ours[row, position], theirs[other_row, position]), (row, position)


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_every_gamma_equals_the_target_alone_bit_for_bit(family: str) -> None:
    model = nested_model(family)
    tokens = small_models.tokens(model, 1, 9)
    with record_logits(model) as expected_logits:
        expected = run(model, tokens, gamma=0)
    accepted = drafted = 0
    for gamma in range(1, 9):
        with record_logits(model) as logits:
            output = run(model, tokens, gamma)
        assert torch.equal(output.sequences, expected.sequences), gamma
        assert_same_logits(logits, expected_logits, 0, 0, range(8, 8 + NEW))
        accepted += output.metrics.accepted
        drafted += output.metrics.drafted
    assert 0 < accepted < drafted


def test_a_16_bit_model() -> None:
    model = nested_model("phi3", torch.bfloat16)
    tokens, mask = padded_prompts(model, [2, 0], 9)
    expected = run(model, tokens, gamma=0, attention_mask=mask)
    output = run(model, tokens, gamma=3, attention_mask=mask)
    assert torch.equal(output.sequences, expected.sequences)
    assert 0 < output.metrics.accepted < output.metrics.drafted


@pytest.mark.parametrize("kv", ["kv4/kv8", "recent(4)", "auto(16)"])
def test_what_drafts_read_of_the_cache_changes_acceptance_alone(kv: str) -> None:
    model = nested_model("qwen2")
    tokens, mask = padded_prompts(model, [2, 0], 9)
    expected = run(model, tokens, gamma=0, attention_mask=mask)
    output = run(model, tokens, gamma=3, attention_mask=mask, kv=kv)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache_of(output).policy == KVPolicy.parse(kv)
    assert 0 < output.metrics.accepted < output.metrics.drafted


def test_auto_switches_at_the_length_of_the_context() -> None:
    model = nested_model("qwen2")
    tokens = small_models.tokens(model, 2, 9)

    def first_drafts(kv: str) -> Tensor:
        logits: list[Tensor] = []

        def hook(module: Any, args: Any, output: Any) -> None:
            if current_view() == "draft":
                logits.append(output.logits)

        handle = model.register_forward_hook(hook)
        run(model, tokens, gamma=3, kv=kv, max_new_tokens=1)
        handle.remove()
        return torch.cat(logits)

    # The first round has a context of 8 positions.
    assert not torch.equal(first_drafts("kv8/kv8"), first_drafts("kv4/kv8"))
    assert torch.equal(first_drafts("auto(8)"), first_drafts("kv8/kv8"))
    assert torch.equal(first_drafts("auto(7)"), first_drafts("kv4/kv8"))


@pytest.mark.parametrize("pads", [[0], [0, 3, 6], [7, 0, 1, 5, 2, 8, 4, 3]])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral"])
def test_a_row_of_a_padded_batch_equals_the_prompt_alone(family: str, pads: list[int]) -> None:
    model = nested_model(family)
    width = 9
    tokens, mask = padded_prompts(model, pads, width)
    with record_logits(model) as logits:
        together = run(model, tokens, gamma=3, attention_mask=mask)
    for row, pad in enumerate(pads):
        with record_logits(model) as alone_logits:
            alone = run(model, tokens[row : row + 1, pad:], gamma=3)
        assert torch.equal(together.sequences[row, pad:], alone.sequences[0])
        generated = range(width - pad - 1, width - pad - 1 + NEW)
        assert_same_logits(logits, alone_logits, row, 0, generated)


def test_prompts_of_one_token() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 4], 5)
    together = run(model, tokens, gamma=2, attention_mask=mask)
    alone = run(model, tokens[1:, 4:], gamma=2)
    assert torch.equal(together.sequences[1, 4:], alone.sequences[0])
    assert torch.equal(alone.sequences, run(model, tokens[1:, 4:], gamma=0).sequences)


@pytest.mark.parametrize(("chunk", "widths"), [(None, [10]), (3, [3, 3, 3, 1])])
def test_the_prompt_may_be_read_in_chunks(chunk: int | None, widths: list[int]) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 6], 11)
    expected = run(model, tokens, gamma=0, attention_mask=mask)
    shapes: list[tuple[int, int]] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        shapes.append((kwargs["input_ids"].shape[1], output.logits.shape[1]))

    handle = model.register_forward_hook(hook, with_kwargs=True)
    output = run(model, tokens, gamma=1, attention_mask=mask, prefill_chunk_size=chunk)
    handle.remove()
    assert torch.equal(output.sequences, expected.sequences)
    # No more logits than of one column in the prefill; then rounds of one and two tokens.
    assert shapes[: len(widths)] == [(width, 1) for width in widths]
    assert shapes[len(widths) :] == [(1, 1), (2, 2)] * output.metrics.verifications


def test_accepting_every_draft_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 9)
    expected = run(model, tokens, gamma=0).sequences
    assert torch.equal(run(model, tokens, gamma=4).sequences, expected)

    def accept_everything(
        self: Any, logits: Tensor, ids: Tensor, last: Tensor, row_drafts: Tensor | None
    ) -> Any:
        own, accepted = verify(self, logits, ids, last, row_drafts)
        drafts = ids.gather(1, last + torch.arange(1, own.shape[1]))
        return torch.cat((drafts, own[:, -1:]), dim=1), torch.ones_like(accepted)

    verify = GreedySelection.verify
    monkeypatch.setattr(GreedySelection, "verify", accept_everything)
    broken = run(model, tokens, gamma=4)
    assert broken.metrics.slot_acceptance == 1
    assert not torch.equal(broken.sequences, expected)


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
@pytest.mark.parametrize("new_tokens", range(1, 11))
def test_the_maximum_length_ends_a_block(gamma: int, new_tokens: int) -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 2, 9)
    expected = run(model, tokens, gamma=0, max_new_tokens=12).sequences
    output = run(model, tokens, gamma, max_new_tokens=new_tokens)
    assert torch.equal(output.sequences, expected[:, : 9 + new_tokens])
    assert output.metrics.tokens == 2 * new_tokens
    by_length = run(model, tokens, gamma, max_new_tokens=None, max_length=9 + new_tokens)
    assert torch.equal(by_length.sequences, output.sequences)


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_an_end_token_ends_the_sequence_inside_a_block(gamma: int) -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 9)
    whole = run(model, tokens, gamma=0).sequences
    generated = whole[0, 9:].tolist()
    unused = next(token for token in range(97) if token not in generated)
    firsts = [n for n, token in enumerate(generated) if token not in generated[:n]]
    assert len(firsts) > 6  # every place in a block
    for first in firsts:
        output = run(model, tokens, gamma, eos_token_id=[unused, generated[first]])
        assert torch.equal(output.sequences, whole[:, : 9 + first + 1])
        assert output.metrics.tokens == first + 1


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("pad", [PAD, None])
def test_finished_rows_are_padded(gamma: int, pad: int | None) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 3, 1, 5], 9)
    whole = run(model, tokens, gamma=0, attention_mask=mask).sequences[:, 9:]
    end = int(whole[0, 6])
    output = run(
        model, tokens, gamma, attention_mask=mask, eos_token_id=[end], pad_token_id=pad
    ).sequences[:, 9:]
    lengths = []
    for row, expected in zip(output.tolist(), whole.tolist(), strict=True):
        length = expected.index(end) + 1 if end in expected else len(expected)
        lengths.append(length)
        assert row[:length] == expected[:length]
        assert set(row[length:]) <= {end if pad is None else pad}
    assert len(set(lengths)) > 1
    assert output.shape[1] == max(lengths)


def test_transformers_generate_takes_the_loop() -> None:
    model = nested_model("qwen3")
    tokens, mask = padded_prompts(model, [0, 3], 9)
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "repetition_penalty": 1.2,
        "gamma": 3,
        "kv": "kv4/kv8",
        "return_dict_in_generate": True,
    }
    ours = speculative_generate(model, tokens, **options)
    theirs = model.generate(tokens, custom_generate=decode, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert theirs.metrics.gamma == 3
    assert theirs.metrics.accepted == ours.metrics.accepted
    assert cache_of(theirs).policy.kind == "kv4"


def test_a_tensor_is_returned_by_default() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 1, 5)
    output = speculative_generate(model, input_ids=tokens, max_new_tokens=3)
    assert isinstance(output, Tensor)
    assert output.shape == (1, 8)


def test_metrics_agree_with_the_output() -> None:
    model = nested_model()
    tokens = small_models.tokens(model, 3, 9)
    metrics = run(model, tokens, gamma=3, max_new_tokens=20).metrics
    assert (metrics.batch, metrics.gamma, metrics.tokens) == (3, 3, 60)
    # A row's last round may offer up to gamma tokens more than there is room for.
    assert 0 <= metrics.rounds + metrics.accepted - metrics.tokens <= 3 * 3
    assert metrics.verifications <= metrics.rounds <= 3 * metrics.verifications
    assert metrics.accepted_per_position == sorted(metrics.accepted_per_position, reverse=True)
    assert metrics.total_seconds > metrics.draft_seconds > 0
    alone = run(model, tokens, gamma=0, max_new_tokens=20).metrics
    assert (alone.rounds, alone.accepted, alone.verifications) == (60, 0, 20)


def test_the_cache_of_the_user_is_filled_and_returned() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 2], 9)
    expected = run(model, tokens, gamma=0, attention_mask=mask)
    cache = NestedKVCache(model.config, 9 + NEW + 5, batch_size=2, policy="kv4/kv8")
    for _ in range(2):
        output = run(model, tokens, gamma=4, attention_mask=mask, **{cache_keyword(model): cache})
        assert torch.equal(output.sequences, expected.sequences)
        assert cache_of(output) is cache
        # All tokens but the last one of each row.
        assert cache.lengths.tolist() == [8 + NEW, 6 + NEW]
        cache.reset()
    # The cache holds what a target-only run writes, whatever drafts wrote in between.
    planes = cache.layers[1].key_planes.base
    assert torch.equal(
        planes[1, :, : 6 + NEW], cache_of(expected).layers[1].key_planes.base[1, :, : 6 + NEW]
    )
