"""What is kept between calls for CUDA graphs, on a CPU; and the graphs, on a GPU."""

import copy
import gc
from typing import Any

import pytest
import small_models
import torch
from speculative_runs import cache_of, nested_model, padded_prompts, run
from test_speculative_stopping import letters_tokenizer
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from nestq import release_graphs
from nestq.kv_cache import cache_keyword
from nestq.kv_policy import KVPolicy
from nestq.speculative import generate, graphs, requests
from nestq.speculative.graph_key import model_key, settings_key
from nestq.speculative.graphs import Shape, captured_decoding, round_up_columns, with_room
from nestq.speculative.round_kinds import kinds_of
from nestq.speculative.sampling import SampledSelection
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection

gpu = pytest.mark.gpu
GREEDY = GreedySelection(ProcessedScores(LogitsProcessorList(), torch.device("cpu")))


def shape_of(model: PreTrainedModel, columns: int = 64) -> Shape:
    kinds = kinds_of(2, 0)
    keys = model_key(model), settings_key()
    return Shape(1, columns, kinds, 4, KVPolicy("kv8"), *keys, GREEDY.key)


def state_of(model: PreTrainedModel, shape: Shape, fail: bool = False, forward: Any = None) -> int:
    """Identity of the decoding state that a call of the shape gets."""
    forward = forward or model
    with captured_decoding(model, forward, shape, None, GREEDY, keep=True) as captured:
        if fail:
            raise KeyboardInterrupt
        return id(captured.state)


def test_calls_of_one_shape_share_a_state() -> None:
    model = copy.deepcopy(nested_model())
    shape = shape_of(model)
    first = state_of(model, shape)
    assert state_of(model, shape) == first
    with captured_decoding(model, model, shape, None, GREEDY, keep=True) as captured:
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
    with captured_decoding(model, model, shape, None, GREEDY, keep=True) as captured:
        first = id(captured.state)
        lent = captured.lend_cache()
        planes = captured.state.cache.layers[0].key_planes
        assert lent.layers[0].key_planes.base is planes.base
    # What changes its form is done to the user's objects alone.
    lent.batch_repeat_interleave(2)
    lent.layers[0].offload()
    assert captured.state.cache.layers[0].key_planes is planes
    assert len(planes.base) == len(captured.state.cache.lengths) == 1
    del captured, planes
    assert state_of(model, shape) != first
    layer = lent.layers[0]
    del lent
    gc.collect()
    assert state_of(model, shape) != first
    del layer
    gc.collect()
    assert first in [id(entry.state) for entry in graphs._kept[model] if entry.lent is not None]
    kept = [entry for entry in graphs._kept[model] if id(entry.state) == first]
    assert kept[0].lent() is None


def test_another_forward_gets_another_state() -> None:
    model = copy.deepcopy(nested_model())

    def forward(**inputs: Any) -> Any:
        return model(**inputs)

    first = state_of(model, shape_of(model), forward=forward)
    assert state_of(model, shape_of(model), forward=forward) == first
    assert state_of(model, shape_of(model)) != first


def test_few_shapes_are_kept_and_none_of_a_model_that_has_changed() -> None:
    model = copy.deepcopy(nested_model())
    for columns in (64, 128, 192, 256):
        state_of(model, shape_of(model, columns))
    assert [entry.shape.columns for entry in graphs._kept[model]] == [192, 256]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    state_of(model, shape_of(model, 64))
    assert [entry.shape.columns for entry in graphs._kept[model]] == [64]


def out_of_memory_once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[str]:
    """Let a function run out of memory where it is called first; what was kept when it was."""
    right = getattr(place, name)
    kept: list[str] = []

    def short(*arguments: Any, **keywords: Any) -> Any:
        kept.append(f"{sum(map(len, graphs._kept.values()))} kept")
        if len(kept) == 1:
            if name != "verify":  # then the round's drafts are left behind
                right(*arguments, **keywords)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(*arguments, **keywords)

    monkeypatch.setattr(place, name, short)
    return kept


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize(
    ("where", "do_sample"), [("allocation", False), ("capture", True), ("prefill", True)]
)
def test_kept_states_go_where_memory_runs_out(
    where: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs._kept.clear()
    small, large = (copy.deepcopy(nested_model()) for _ in range(2))
    tokens = small_models.tokens(small, 2, 9)
    options = {"do_sample": do_sample, "seed": 1}
    expected = run(large, tokens, 3, cuda_graph=False, **options).sequences
    run(small, tokens[:1], 3)
    run(small, tokens[:1], 2)
    places = {
        "allocation": (graphs, "new_cache"),
        "capture": (SampledSelection, "verify"),
        "prefill": (generate, "prefill"),
    }
    kept = out_of_memory_once(monkeypatch, *places[where])
    output = run(large, tokens, 3, **options)
    assert output.metrics.in_graph
    assert torch.equal(output.sequences, expected)
    assert kept[:2] == ["2 kept", "0 kept"]
    assert "released 2 decoding state(s)" in caplog.text
    del output
    # The state of the call itself is kept.
    assert [len(graphs._kept[model]) for model in (small, large)] == [0, 1]


def test_memory_that_runs_out_without_kept_states_is_the_callers() -> None:
    graphs._kept.clear()
    calls = []

    def short() -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        with_room(short)
    assert len(calls) == 1
    model = copy.deepcopy(nested_model())
    state_of(model, shape_of(model))
    with pytest.raises(torch.OutOfMemoryError):
        with_room(short)
    assert len(calls) == 3


@pytest.mark.usefixtures("fake_graphs")
def test_rounds_follow_what_is_done_to_the_model() -> None:
    model = copy.deepcopy(nested_model())
    tokens = small_models.tokens(model, 1, 9)
    run(model, tokens, 2)

    def negated(module: Any, inputs: Any, output: Any) -> Any:
        return -output

    handle = model.lm_head.register_forward_hook(negated)
    expected = run(model, tokens, 2, cuda_graph=False).sequences
    assert torch.equal(run(model, tokens, 2).sequences, expected)
    assert [entry.shape.model for entry in graphs._kept[model]] == [model_key(model)]
    handle.remove()
    assert not torch.equal(run(model, tokens, 2).sequences, expected)


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("gamma", [0, 3, "auto"])
def test_the_host_ends_rows_while_a_round_is_under_way(gamma: Any) -> None:
    model = copy.deepcopy(nested_model())
    tokenizer = letters_tokenizer(97)
    tokens, mask = padded_prompts(model, [0, 2, 5], 12)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "max_time": 1000.0}
    whole = run(model, tokens, 0, cuda_graph=False, **options).sequences
    for row, column in ((0, 14), (1, 20), (2, 17)):
        stop = tokenizer.decode(whole[row, column : column + 2])
        stops = {"stop_strings": stop, "tokenizer": tokenizer}
        expected = run(model, tokens, 0, cuda_graph=False, **options, **stops)
        output = run(model, tokens, gamma, **options, **stops)
        assert output.metrics.in_graph
        assert torch.equal(output.sequences, expected.sequences)
        assert output.metrics.tokens == expected.metrics.tokens
        assert torch.equal(cache_of(output).lengths, cache_of(expected).lengths)


def test_what_is_kept_goes_with_the_model() -> None:
    model = copy.deepcopy(nested_model())
    state_of(model, shape_of(model))
    gc.collect()
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


class FakeGraph:
    """A round that runs again where a graph would be replayed."""

    def __init__(self, run: Any, length: int) -> None:
        self.replay = lambda: run(length)

    def pool(self) -> None:
        """Memory has no pool here."""


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the capture itself, on a CPU."""

    def captured(self: Any, run: Any, length: int) -> FakeGraph:
        for _ in range(graphs.WARM_UP_ROUNDS):
            run(length)
        return FakeGraph(run, length)

    monkeypatch.setattr(graphs.RoundGraphs, "_captured", captured)
    monkeypatch.setattr(requests, "check_cuda_graph", lambda asked, *_: asked is not False)


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("pads", [[0], [4, 2]])
@pytest.mark.parametrize("kv", ["kv4/kv8", "auto(7)", "auto(9)", "auto(11)", "auto(12)"])
def test_what_drafts_read_may_change_anywhere(kv: str, pads: list[int]) -> None:
    model = copy.deepcopy(nested_model())
    tokens, mask = padded_prompts(model, pads, 12)
    options = {"attention_mask": mask, "kv": kv}
    expected = run(model, tokens, 0, cuda_graph=False, **options).sequences
    for new in (1, 2, 16):
        output = run(model, tokens, 3, max_new_tokens=new, **options)
        assert output.metrics.in_graph
        assert torch.equal(output.sequences, expected[:, : 12 + new])


@pytest.mark.usefixtures("fake_graphs")
def test_no_round_runs_that_cannot_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(nested_model())
    tokens = small_models.tokens(model, 1, 9)
    run(model, tokens, 0, max_new_tokens=5)
    replays = []
    replay = graphs.RoundGraphs.replay

    def counted(self: Any, *arguments: Any) -> None:
        replays.append(arguments)
        replay(self, *arguments)

    monkeypatch.setattr(graphs.RoundGraphs, "replay", counted)
    run(model, tokens, 0, max_new_tokens=5)
    assert len(replays) == 5


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_kept_state_serves_in_and_outside_inference_mode(do_sample: bool) -> None:
    model = copy.deepcopy(nested_model())
    tokens = small_models.tokens(model, 1, 9)
    options = {"do_sample": do_sample, "seed": 3, "kv": "kv8/kv8"}
    with torch.inference_mode():
        first = run(model, tokens, 2, **options).sequences
    assert torch.equal(run(model, tokens, 2, **options).sequences, first)
    with torch.inference_mode():
        assert torch.equal(run(model, tokens, 2, **options).sequences, first)
    assert len(graphs._kept[model]) == 1


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_model_that_cannot_be_traced_decodes_all_the_same(do_sample: bool) -> None:
    model = copy.deepcopy(nested_model())
    tokens = small_models.tokens(model, 1, 9)
    options = {"do_sample": do_sample, "seed": 3}
    expected = run(model, tokens, 2, cuda_graph=False, **options).sequences

    def looks_at_a_number(module: Any, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() and output.shape[1] > 1:  # not in drafts
            torch._dynamo.graph_break()

    model.model.norm.register_forward_hook(looks_at_a_number)
    torch._dynamo.reset()
    for cuda_graph in (None, True):
        with pytest.warns(UserWarning, match="cannot be traced"):
            output = run(model, tokens, 2, cuda_graph=cuda_graph, **options)
        assert output.metrics.in_graph is bool(cuda_graph)
        assert torch.equal(output.sequences, expected)
        release_graphs(model)


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


@gpu
def test_graphs_of_several_kinds_share_a_state() -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens, mask = padded_prompts(model, [0, 3, 7], 12)
    inputs = {"attention_mask": mask.cuda(), "max_new_tokens": 100}
    expected = run(model, tokens.cuda(), 0, cuda_graph=False, **inputs)
    for options in ({"gamma": "auto"}, {"gamma": "auto", "prompt_lookup": 10}, {"gamma": 3}):
        for _ in range(2):  # the second call takes over the graphs and times of the first
            output = run(model, tokens.cuda(), **options, **inputs)
            assert output.metrics.in_graph
            assert torch.equal(output.sequences, expected.sequences)
            del output  # whose cache would keep the state from the next call
    kinds = [entry.shape.kinds for entry in graphs._kept[model]]
    assert kinds[-2:] == [kinds_of("auto", 10), kinds_of(3, 0)]


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
@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"do_sample": True} | o for o in SAMPLING.values()),
        {"gamma": "auto", "prompt_lookup": 8},
        {"max_time": 1000.0},
    ],
)
def test_the_host_waits_for_nothing_but_reports(options: dict[str, Any]) -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens = small_models.tokens(model, 1, 12).cuda()
    options = {"gamma": 3, **options}
    run(model, tokens, **options)
    inner = generate.complete

    def strict(*args: Any) -> int:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    generate.complete = strict
    try:
        run(model, tokens, **options)
    finally:
        generate.complete = inner


@gpu
def test_rounds_that_keep_scores_are_eager() -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens = small_models.tokens(model, 2, 9).cuda()
    kept = {"output_scores": True, "output_logits": True}
    expected = run(model, tokens, 0, **kept)
    output = run(model, tokens, 3, **kept)
    assert not output.metrics.in_graph
    assert torch.equal(output.sequences, run(model, tokens, 3).sequences)
    for name in ("scores", "logits"):
        assert all(map(torch.equal, output[name], expected[name]))
    with pytest.raises(ValueError, match="output_scores and output_logits are kept round by round"):
        run(model, tokens, 3, cuda_graph=True, **kept)


@gpu
def test_a_cache_is_continued_by_graphs() -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens, mask = padded_prompts(model, [0, 3], 12)
    inputs = {"attention_mask": mask.cuda()}
    first = run(model, tokens.cuda(), 3, **inputs)
    ids = torch.cat((first.sequences, small_models.tokens(model, 2, 4).cuda()), 1)
    inputs = {
        "attention_mask": torch.nn.functional.pad(mask, (0, ids.shape[1] - 12), value=1).cuda()
    }
    expected = run(model, ids, 0, cuda_graph=False, **inputs)
    output = run(model, ids, 3, **inputs, **{cache_keyword(model): cache_of(first)})
    assert output.metrics.in_graph
    assert torch.equal(output.sequences, expected.sequences)
    assert cache_of(output) is cache_of(first)
    # What later calls take over is not the cache that was given, nor what it grew from.
    again = run(model, tokens.cuda(), 3, attention_mask=mask.cuda())
    assert torch.equal(again.sequences, first.sequences)


@gpu
@pytest.mark.parametrize("do_sample", [False, True])
def test_weights_of_nan_in_graphs(do_sample: bool) -> None:
    model = copy.deepcopy(nested_model(dtype=torch.bfloat16)).cuda()
    tokens = small_models.tokens(model, 2, 9).cuda()
    expected = run(model, tokens, 3, do_sample=do_sample, seed=1).sequences
    norm = model.model.norm.weight
    good = norm.clone()
    with torch.no_grad():
        norm.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"no token can be chosen: .* in row\(s\) 0, 1;"):
        run(model, tokens, 3, do_sample=do_sample, seed=1)
    with torch.no_grad():
        norm.copy_(good)
    assert torch.equal(run(model, tokens, 3, do_sample=do_sample, seed=1).sequences, expected)
