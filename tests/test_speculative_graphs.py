"""What is kept between calls for CUDA graphs, on a CPU; and the graphs, on a GPU."""

import copy
import gc
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import cache_of, nested_model, padded_prompts, run
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from nestq import release_graphs
from nestq.kv_policy import KVPolicy
from nestq.speculative import graphs
from nestq.speculative.graphs import Shape, addresses, captured_decoding, round_up_columns
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection

gpu = pytest.mark.gpu
GREEDY = GreedySelection(ProcessedScores(LogitsProcessorList(), torch.device("cpu")))


def shape_of(model: PreTrainedModel, columns: int = 64) -> Shape:
    return Shape(1, columns, 2, 4, KVPolicy("kv8"), id(model), addresses(model), GREEDY.key)


def state_of(model: PreTrainedModel, shape: Shape, fail: bool = False) -> int:
    """Identity of the decoding state that a call of the shape gets."""
    with captured_decoding(model, shape, None, GREEDY, keep=True) as captured:
        if fail:
            raise KeyboardInterrupt
        return id(captured.state)


def test_calls_of_one_shape_share_a_state() -> None:
    model = copy.deepcopy(nested_model())
    shape = shape_of(model)
    first = state_of(model, shape)
    assert state_of(model, shape) == first
    with captured_decoding(model, shape, None, GREEDY, keep=True) as captured:
        assert id(captured.state) == first
        # It is in use: another call at the same time gets its own.
        assert state_of(model, shape) != first
    release_graphs(model)
    assert not graphs._kept.get(model)


def test_a_state_is_not_kept_after_an_error() -> None:
    model = copy.deepcopy(nested_model())
    state_of(model, shape_of(model))
    with pytest.raises(KeyboardInterrupt):
        state_of(model, shape_of(model), fail=True)
    assert not graphs._kept[model]


def test_a_cache_that_the_user_holds_is_not_taken_over() -> None:
    model = copy.deepcopy(nested_model())
    shape = shape_of(model)
    with captured_decoding(model, shape, None, GREEDY, keep=True) as captured:
        first = id(captured.state)
        lent = captured.lend_cache()
        assert lent.layers is captured.state.cache.layers
    del captured
    assert state_of(model, shape) != first
    del lent
    gc.collect()
    assert first in [id(entry.state) for entry in graphs._kept[model]]


def test_few_shapes_are_kept_and_none_whose_weights_moved() -> None:
    model = copy.deepcopy(nested_model())
    for columns in (64, 128, 192, 256):
        state_of(model, shape_of(model, columns))
    assert [entry.shape.columns for entry in graphs._kept[model]] == [192, 256]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    state_of(model, shape_of(model, 64))
    assert [entry.shape.columns for entry in graphs._kept[model]] == [64]


def test_what_is_kept_goes_with_the_model() -> None:
    model = copy.deepcopy(nested_model())
    state_of(model, shape_of(model))
    before = len(graphs._kept)
    del model
    gc.collect()
    assert len(graphs._kept) == before - 1


def test_columns_are_rounded_up_by_a_quarter_at_most() -> None:
    sizes = range(1, 5000)
    assert all(n <= round_up_columns(n) <= max(n * 1.25 + 1, n + 63) for n in sizes)
    assert len({round_up_columns(n) for n in sizes}) <= 32


@pytest.mark.parametrize(("value", "error"), [(1.5, "True, False or None"), (True, "is on cpu")])
def test_graphs_that_cannot_be_are_refused(value: Any, error: str) -> None:
    model = nested_model()
    with pytest.raises(ValueError, match=f"cuda_graph.*{error}"):
        run(model, small_models.tokens(model, 1, 9), gamma=2, cuda_graph=value)


@gpu
@pytest.mark.parametrize("kv", ["kv8/kv8", "kv4/kv8", "recent(4)", "auto(20)"])
def test_tokens_of_graphs_are_those_of_eager_rounds(kv: str) -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens, mask = padded_prompts(model, [0, 3, 7], 12)
    inputs = {"attention_mask": mask.cuda(), "kv": kv, "max_new_tokens": 40}
    end = int(run(model, tokens.cuda(), 0, cuda_graph=False, **inputs).sequences[1, 30])
    for options in ({}, {"eos_token_id": [end, 3]}):
        expected = run(model, tokens.cuda(), 0, cuda_graph=False, **inputs, **options)
        assert not expected.metrics.in_graph
        for gamma in (0, 1, 4, 4):
            output = run(model, tokens.cuda(), gamma, **inputs, **options)
            assert output.metrics.in_graph
            assert torch.equal(output.sequences, expected.sequences)
            eager = run(model, tokens.cuda(), gamma, cuda_graph=False, **inputs, **options)
            assert torch.equal(output.sequences, eager.sequences)
            ours, theirs = output.metrics, eager.metrics
            # The host knows a length one round later, and ``auto`` depends on it.
            if "auto" not in kv:
                assert ours.rounds == theirs.rounds
                assert ours.accepted_per_position == theirs.accepted_per_position


def test_selections_of_other_kinds_or_constants_share_no_state() -> None:
    model = copy.deepcopy(nested_model())
    first = state_of(model, shape_of(model))
    sampled = shape_of(model)._replace(selection=("sampled", GREEDY.scores.key))
    assert state_of(model, sampled) != first
    assert state_of(model, shape_of(model)) == first


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "warpers": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "penalty": {"repetition_penalty": 1.3, "epsilon_cutoff": 0.001, "renormalize_logits": True},
}


@gpu
@pytest.mark.parametrize("name", SAMPLING)
def test_samples_of_graphs_are_those_of_eager_rounds(name: str) -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens, mask = padded_prompts(model, [0, 3, 7], 12)
    inputs: dict[str, Any] = {"attention_mask": mask.cuda(), "max_new_tokens": 40}
    inputs |= {"do_sample": True, **SAMPLING[name]}
    seen = []
    for gamma in (0, 1, 4):
        for seed in (1, [2, 3, 4]):  # the second call takes over the graph of the first
            output = run(model, tokens.cuda(), gamma, seed=seed, **inputs)
            eager = run(model, tokens.cuda(), gamma, seed=seed, cuda_graph=False, **inputs)
            assert output.metrics.in_graph
            assert not eager.metrics.in_graph
            assert torch.equal(output.sequences, eager.sequences)
            assert output.metrics.accepted_per_position == eager.metrics.accepted_per_position
            seen.append(output.sequences)
            if gamma:
                assert 0 < output.metrics.accepted < output.metrics.drafted
    assert len({sequence.cpu().numpy().tobytes() for sequence in seen}) == len(seen)
    # Other constants need another graph, and other prompts other columns of the penalty.
    hot = run(model, tokens.cuda(), 4, seed=1, **inputs | {"temperature": 1.5})
    assert not torch.equal(hot.sequences, seen[4])
    fewer = mask.roll(1, 0)
    expected = run(
        model, tokens.cuda(), 4, seed=1, cuda_graph=False, **inputs | {"attention_mask": fewer}
    )
    output = run(model, tokens.cuda(), 4, seed=1, **inputs | {"attention_mask": fewer})
    assert torch.equal(output.sequences, expected.sequences)


class _Tokens(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value)

    def end(self) -> None:
        """Nothing is kept back."""


@gpu
def test_streams_caches_and_stops_of_graphs() -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens = small_models.tokens(model, 1, 12).cuda()
    streamer = _Tokens()
    first = run(model, tokens, 3, streamer=streamer, max_new_tokens=30)
    assert torch.equal(torch.cat(streamer.values[1:]), first.sequences[0, 12:].cpu())
    kept = [plane.clone() for plane in (cache_of(first).layers[0].key_planes.base,)]
    second = run(model, tokens.flip(1), 3, max_new_tokens=30)
    assert torch.equal(cache_of(first).layers[0].key_planes.base, kept[0])
    del first
    timed = run(model, tokens, 3, max_new_tokens=30, max_time=0.0)
    assert timed.sequences.shape[1] == 13
    assert not torch.equal(second.sequences, run(model, tokens, 3, max_new_tokens=30).sequences)


@gpu
@pytest.mark.parametrize("options", [{}, *({"do_sample": True} | o for o in SAMPLING.values())])
def test_the_host_waits_for_nothing_but_reports(options: dict[str, Any]) -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens = small_models.tokens(model, 1, 12).cuda()
    run(model, tokens, 3, **options)
    from nestq.speculative import generate

    inner = generate.complete

    def strict(*args: Any) -> int:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    generate.complete = strict
    try:
        run(model, tokens, 3, **options)
    finally:
        generate.complete = inner
