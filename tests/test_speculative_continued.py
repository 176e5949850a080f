"""A cache of an earlier call has the beginning of the next prompt: only the rest is read."""

import copy
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import cache_of, nested_model, run
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.speculative import decode


def turn(model: PreTrainedModel, batch: int, count: int, seed: int = 9) -> Tensor:
    return small_models.tokens(model, batch, count, seed=seed)


def widths_of(model: PreTrainedModel) -> tuple[list[int], Any]:
    """Columns of each forward pass from now on, and the hook to be removed."""
    widths: list[int] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    return widths, model.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("kv", ["kv8/kv8", "kv4/kv8"])
@pytest.mark.parametrize("gamma", [0, 3])
def test_three_turns(gamma: int, kv: str) -> None:
    model = nested_model("qwen2")
    ids = turn(model, 1, 6, seed=1)
    given: dict[str, Any] = {}
    for number in range(3):
        expected = run(model, ids, 0, max_new_tokens=7, output_logits=True)
        widths, hook = widths_of(model)
        output = run(model, ids, gamma, max_new_tokens=7, output_logits=True, kv=kv, **given)
        hook.remove()
        assert torch.equal(output.sequences, expected.sequences)
        assert all(map(torch.equal, output.logits, expected.logits))
        # The last token of the answer and all but the last of the turn.
        assert widths[0] == (5 if number == 0 else 4)
        cache = cache_of(output)
        assert cache.lengths.tolist() == [output.sequences.shape[1] - 1]
        given = {cache_keyword(model): cache}
        ids = torch.cat((output.sequences, turn(model, 1, 4, seed=number)), 1)


def test_a_cache_with_room_is_used_in_place() -> None:
    model = nested_model()
    cache = NestedKVCache(model.config, 64)
    given: dict[str, Any] = {cache_keyword(model): cache}
    first = run(model, turn(model, 1, 5), 2, max_new_tokens=4, **given)
    address = cache.layers[0].key_planes.base.data_ptr()
    ids = torch.cat((first.sequences, turn(model, 1, 3)), 1)
    output = run(model, ids, 2, max_new_tokens=4, **given)
    assert cache_of(output) is cache
    assert cache.layers[0].key_planes.base.data_ptr() == address
    assert torch.equal(output.sequences, run(model, ids, 0, max_new_tokens=4).sequences)


def test_a_cache_without_room_grows() -> None:
    model = nested_model()
    first = run(model, turn(model, 1, 5), 2, max_new_tokens=4)
    cache = cache_of(first)
    layers, planes = cache.layers, cache.layers[0].key_planes
    before = planes.base.clone()
    ids = torch.cat((first.sequences, turn(model, 1, 30)), 1)
    output = run(model, ids, 2, max_new_tokens=4, **{cache_keyword(model): cache})
    assert cache.get_max_length() == 39 + 4 + 3
    assert cache_of(output) is cache
    # Graphs over the old planes would still find them.
    assert cache.layers is not layers
    assert planes.base.shape == before.shape
    with pytest.raises(ValueError, match="max_length must be at least 46"):
        cache.grow(45)


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("chunk", [None, 3])
def test_rows_of_different_lengths(gamma: int, chunk: int | None) -> None:
    """Rows ended at different lengths, and are padded anew with their next turns."""
    model = nested_model()
    tokens = turn(model, 3, 6)
    whole = run(model, tokens, 0).sequences
    first = run(model, tokens, gamma, eos_token_id=int(whole[1, 9]))
    cache = cache_of(first)
    lengths = cache.lengths.tolist()
    assert len(set(lengths)) > 1
    known = [row[: length + 1] for row, length in zip(first.sequences, lengths, strict=True)]
    turns = [turn(model, 1, count)[0] for count in (4, 1, 2)]
    rows = [torch.cat(pair) for pair in zip(known, turns, strict=True)]
    width = max(map(len, rows))
    ids = torch.stack([torch.cat((row.new_zeros(width - len(row)), row)) for row in rows])
    mask = torch.arange(width) >= torch.tensor([[width - len(row)] for row in rows])
    options: dict[str, Any] = {"attention_mask": mask.long(), "prefill_chunk_size": chunk}
    expected = run(model, ids, 0, **options).sequences
    output = run(model, ids, gamma, **options, **{cache_keyword(model): cache}).sequences
    assert torch.equal(output, expected)


def test_a_cache_may_be_rolled_back() -> None:
    """By lowering its lengths, to where two conversations part."""
    model = nested_model()
    first = run(model, turn(model, 1, 8), 3)
    cache = cache_of(first)
    cache.lengths.fill_(5)
    ids = torch.cat((first.sequences[:, :5], turn(model, 1, 4)), 1)
    output = run(model, ids, 3, **{cache_keyword(model): cache})
    assert torch.equal(output.sequences, run(model, ids, 0).sequences)


def test_nothing_new_but_the_last_token() -> None:
    model = nested_model()
    first = run(model, turn(model, 1, 5), 3, max_new_tokens=4)
    output = run(
        model, first.sequences, 3, max_new_tokens=6, **{cache_keyword(model): cache_of(first)}
    )
    expected = run(model, turn(model, 1, 5), 0, max_new_tokens=10).sequences
    assert torch.equal(output.sequences, expected)


def test_samples_continue() -> None:
    model = nested_model()
    sampled: dict[str, Any] = {"do_sample": True, "seed": 3}
    first = run(model, turn(model, 1, 5), 3, **sampled)
    ids = torch.cat((first.sequences, turn(model, 1, 3)), 1)
    output = run(model, ids, 3, **{cache_keyword(model): cache_of(first)}, **sampled)
    assert torch.equal(output.sequences, run(model, ids, 3, **sampled).sequences)


def test_an_interrupted_call_leaves_a_cache_that_can_be_continued() -> None:
    model = nested_model()
    cache = NestedKVCache(model.config, 64)
    calls: list[int] = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt

    ids = turn(model, 1, 6)
    expected = run(model, ids, 0).sequences
    hook = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, ids, 3, **{cache_keyword(model): cache})
    hook.remove()
    length = int(cache.lengths)
    assert 5 < length < expected.shape[1]
    known = torch.cat((expected[:, : length + 1], turn(model, 1, 2)), 1)
    output = run(model, known, 3, **{cache_keyword(model): cache})
    assert torch.equal(output.sequences, run(model, known, 0).sequences)


def test_what_is_refused() -> None:
    model = nested_model()
    tokens = turn(model, 2, 5)
    first = run(model, tokens, 3, max_new_tokens=4)
    cache = cache_of(first)
    before = cache.lengths.clone()
    keyword = cache_keyword(model)

    def refuses(message: str, ids: Tensor, **options: Any) -> None:
        widths, hook = widths_of(model)
        with pytest.raises(ValueError, match=message):
            run(model, ids, 3, **{keyword: cache}, **options)
        with pytest.raises(ValueError, match=message):
            model.generate(
                ids, custom_generate=decode, max_new_tokens=4, **{keyword: cache}, **options
            )
        hook.remove()
        assert not widths
        assert torch.equal(cache.lengths, before)

    message = r"cache must hold less than the prompt, got 8 positions for the 3 tokens of row 0"
    refuses(message, turn(model, 2, 3))
    refuses("got 8 positions for the 8 tokens of row 0", first.sequences[:, :8])
    mask = torch.ones_like(first.sequences)
    mask[1, :2] = 0
    refuses("8 positions for the 7 tokens of row 1", first.sequences, attention_mask=mask)
    refuses("batch_size=1, got batch_size=2", first.sequences[:1])
    embeddings = model.get_input_embeddings()(first.sequences).detach()
    refuses("cache must be empty where inputs_embeds", first.sequences, inputs_embeds=embeddings)
    model(tokens, **{keyword: cache})
    refuses("got one that a forward pass of the model filled", first.sequences)


def test_what_is_cached_is_not_written_again() -> None:
    """The ids of a prompt of embeddings are not known, and need not be."""
    model = nested_model()
    embeddings: Tensor = model.get_input_embeddings()(turn(model, 2, 6)).detach()
    whole = run(model, None, 0, inputs_embeds=embeddings).sequences
    first = run(model, None, 3, inputs_embeds=embeddings, eos_token_id=int(whole[1, 4]))
    cache = cache_of(first)
    lengths = cache.lengths.tolist()
    assert lengths[1] + 2 < lengths[0]
    prompt = torch.ones(6, dtype=torch.int64)  # any ids but the pad token
    # The second row has so much to be read that the first one's prompt lies beside it.
    rows = [
        torch.cat((prompt, answer[: length + 1 - 6], turn(model, 1, count)[0]))
        for answer, length, count in zip(first.sequences, lengths, (1, 20), strict=True)
    ]
    missing = len(rows[1]) - len(rows[0])
    ids = torch.stack((torch.cat((rows[0].new_zeros(missing), rows[0])), rows[1]))
    mask = torch.ones_like(ids)
    mask[0, :missing] = 0
    keyword = cache_keyword(model)
    expected = []
    for row in range(2):
        alone = copy.deepcopy(cache)
        alone.batch_select_indices(torch.tensor([row]))
        expected.append(run(model, rows[row][None], 0, **{keyword: alone}).sequences[0])
    output = run(model, ids, 3, attention_mask=mask, **{keyword: cache}).sequences
    assert torch.equal(output[0, missing:], expected[0])
    assert torch.equal(output[1], expected[1])
