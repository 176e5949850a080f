"""``output_scores`` and ``output_logits``: those of the target alone, in transformers' form."""

from typing import Any

import pytest
import small_models
import torch
from speculative_runs import cache_of, nested_model, padded_prompts, run
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from nestq.attention import nested_attention_implementation
from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.speculative import decode, speculative_generate
from nestq.speculative.requests import check_cuda_graph
from nestq.view import nest_view

BOTH = {"output_scores": True, "output_logits": True}
NAMES = ("scores", "logits")


def assert_same_outputs(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in NAMES:
        assert len(ours[name]) == len(theirs[name])
        for one, other in zip(ours[name], theirs[name], strict=True):
            assert torch.equal(one, other), name


@torch.no_grad()
def target_logits(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """What one forward pass of the target gives from the column ``first`` on."""
    cache = NestedKVCache(model.config, ids.shape[1], len(ids))
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    with (
        nested_attention_implementation(model),
        nest_view("target"),
        cache.at(positions),
    ):
        keywords: dict[str, Any] = {cache_keyword(model): cache, "position_ids": positions}
        return model(ids, **keywords).logits[:, first - 1 : -1].float()


@pytest.mark.parametrize("gamma", [0, 3])
def test_logits_are_those_of_a_pass_of_the_target(gamma: int) -> None:
    model = nested_model("qwen2", torch.bfloat16)
    tokens = small_models.tokens(model, 2, 7)
    output = run(model, tokens, gamma, output_logits=True, max_new_tokens=9)
    assert isinstance(output.logits, tuple)
    assert len(output.logits) == 9
    assert all(step.dtype == torch.float32 for step in output.logits)
    expected = target_logits(model, output.sequences, 7)
    assert torch.equal(torch.stack(output.logits, 1), expected)
    assert output.scores is None


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}, {"do_sample": True, "top_k": 9}],
    ids=["plain", "processors", "sampled"],
)
def test_outputs_of_every_gamma_are_those_of_gamma_0(options: dict[str, Any]) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 3], 8)
    arguments = {"attention_mask": mask, "max_new_tokens": 8, **BOTH, **options}
    if options.get("do_sample"):
        arguments["seed"] = 4
    expected = run(model, tokens, 0, **arguments)
    assert [step.shape for step in expected.scores] == [(2, 97)] * 8
    same = all(map(torch.equal, expected.scores, expected.logits))
    assert same == (not options)
    for gamma in (1, 4):
        output = run(model, tokens, gamma, **arguments)
        if not options.get("do_sample"):
            assert_same_outputs(output, expected)
            continue
        # Another gamma samples other tokens: the same pass gives the same logits.
        alone = target_logits(model, output.sequences[:1], 8)
        assert torch.equal(torch.stack(output.logits, 1)[:1], alone)
        allowed = torch.stack(output.scores, 1) > -torch.inf
        assert (allowed.sum(-1) == 9).all()
        assert allowed.gather(2, output.sequences[:, 8:, None]).all()


@pytest.mark.parametrize(
    "drafting",
    [{"gamma": "auto"}, {"gamma": 2, "prompt_lookup": 3}, {"gamma": 4, "draft_stop": 0.3}],
    ids=str,
)
def test_outputs_of_rounds_of_other_kinds(drafting: dict[str, Any]) -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 3], 8)
    arguments: dict[str, Any] = {"attention_mask": mask, "eos_token_id": [3, 50, 61], **BOTH}
    expected = run(model, tokens, 0, **arguments)
    output = speculative_generate(
        model, tokens, max_new_tokens=16, return_dict_in_generate=True, **arguments, **drafting
    )
    assert_same_outputs(output, expected)


@pytest.mark.parametrize("gamma", [0, 3])
def test_rows_that_ended_have_what_follows_their_padding(gamma: int) -> None:
    """As in transformers, whose rows go on with pad tokens."""
    model = nested_model()
    tokens = small_models.tokens(model, 3, 8)
    whole = run(model, tokens, 0, max_new_tokens=12).sequences
    end = int(whole[1, 10])
    output = run(model, tokens, gamma, max_new_tokens=12, eos_token_id=end, **BOTH)
    lengths = (output.sequences[:, 8:] != 0).sum(1)
    assert lengths.min() <= 3 < lengths.max() == output.sequences.shape[1] - 8 == len(output.logits)
    expected = target_logits(model, output.sequences, 8)
    assert torch.equal(torch.stack(output.logits, 1), expected)
    assert torch.equal(torch.stack(output.scores, 1), expected)


def test_the_form_is_that_of_transformers() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 2], 6)
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, **BOTH}
    arguments |= {"return_dict_in_generate": True, "repetition_penalty": 1.3}
    theirs = model.generate(tokens, do_sample=False, **arguments)
    ours = speculative_generate(model, tokens, gamma=2, **arguments)
    through = model.generate(tokens, custom_generate=decode, gamma=2, **arguments)
    assert_same_outputs(through, ours)
    for name in NAMES:
        forms = [
            [(type(step), step.shape, step.dtype) for step in output[name]]
            for output in (ours, theirs)
        ]
        assert forms[0] == forms[1]
        assert type(ours[name]) is type(theirs[name])
    # A function of transformers that takes what it returns itself.
    gains = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    best = torch.stack(ours.scores, 1).log_softmax(-1).amax(-1)
    torch.testing.assert_close(gains, best)


def test_keeping_scores_changes_nothing_else() -> None:
    model = nested_model()
    tokens, mask = padded_prompts(model, [0, 3], 8)
    arguments: dict[str, Any] = {"attention_mask": mask, "eos_token_id": [3, 50, 61]}
    plain = run(model, tokens, 3, **arguments)
    kept = run(model, tokens, 3, **arguments, **BOTH)
    assert torch.equal(kept.sequences, plain.sequences)
    assert kept.metrics.accepted_per_position == plain.metrics.accepted_per_position
    assert torch.equal(cache_of(kept).lengths, cache_of(plain).lengths)


def test_no_scores_without_a_dict() -> None:
    """As in transformers, which computes none then."""
    model = nested_model()
    tokens = small_models.tokens(model, 1, 5)
    output = speculative_generate(model, tokens, max_new_tokens=3, output_scores=True)
    assert isinstance(output, Tensor)


def test_rounds_that_keep_scores_are_no_graphs() -> None:
    model = nested_model()
    for asked in (None, False):
        assert not check_cuda_graph(asked, model, waits=False, keeps_scores=True)
    with pytest.raises(ValueError, match=r"cuda_graph=True is not possible here: the model is on"):
        run(model, small_models.tokens(model), 2, cuda_graph=True, **BOTH)


def test_processors_see_the_same_contexts() -> None:
    """Scores are kept by calling processors once more, with nothing new."""
    model = nested_model()
    tokens = small_models.tokens(model, 1, 5)
    contexts: set[tuple[int, ...]] = set()

    def remember(ids: Any, scores: Any) -> Any:
        contexts.update(map(tuple, ids.tolist()))
        return scores

    arguments = {"logits_processor": LogitsProcessorList([remember]), "max_new_tokens": 6}
    output = run(model, tokens, 2, **arguments)
    plain = set(contexts)
    contexts.clear()
    assert torch.equal(
        run(model, tokens, 2, **arguments, output_scores=True).sequences, output.sequences
    )
    assert contexts == plain
