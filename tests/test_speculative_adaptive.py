"""Rounds that are chosen, stop early or look tokens up give what the target gives alone."""

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import small_models
import torch
from nested_models import nest_
from sampling_runs import LEAST_P, fit_p, same_p, samples, target_samples
from speculative_runs import PAD, nested_model, padded_prompts, run
from torch import Tensor
from transformers import PreTrainedModel

import nestq.passes.backend
from nestq.speculative import generate, requests
from nestq.speculative.adaptive import RETRY_TOKENS, Chooser, RoundTimes
from nestq.speculative.draft_stop import StoppingRound
from nestq.speculative.graphs import RoundGraphs
from nestq.speculative.prompt_lookup import LookupRound
from nestq.speculative.round import Drafts, Round
from nestq.speculative.round_kinds import RoundKind
from nestq.speculative.sampling import SampledSelection
from nestq.speculative.selection import GreedySelection
from nestq.tensor import NestedQuantTensor

NEW = 30
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"gamma": "auto"},
    "stop": {"gamma": 4, "draft_stop": 0.05},
    "lookup": {"gamma": 2, "prompt_lookup": 5},
    "all": {"gamma": "auto", "draft_stop": 0.05, "prompt_lookup": 9},
}


@pytest.fixture(autouse=True)
def _no_warning_of_collapse() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gamma='auto': drafts do not pay here")
        yield


@pytest.fixture
def draft_cost(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time of a draft step in verifications, in place of times that are measured."""
    cost = [0.1]
    add = RoundTimes.add

    def with_cost(self: RoundTimes, kind: RoundKind, seconds: float) -> None:
        assert seconds > 0
        add(self, kind, 1 + cost[0] * kind.tokens * (not kind.lookup))

    monkeypatch.setattr(RoundTimes, "add", with_cost)
    return cost


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[RoundKind]:
    """Kinds that are chosen."""
    chosen: list[RoundKind] = []
    choose = Chooser.choose

    def noted(self: Chooser, matches: float = 0.0) -> RoundKind:
        chosen.append(choose(self, matches))
        return chosen[-1]

    monkeypatch.setattr(Chooser, "choose", noted)
    return chosen


@pytest.fixture
def any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds in turn, so that each follows each."""
    turns = [0, 5, 1, 3, 6, 2, 4, 4, 0, 6, 1, 5, 5, 2, 3, 3, 0, 1, 6, 2]
    state = {"turn": 0, "kinds": ()}
    begin = Chooser.__init__

    def remembers(self: Chooser, kinds: Any, times: Any) -> None:
        begin(self, kinds, times)
        state["kinds"] = kinds

    def choose(self: Chooser, matches: float = 0.0) -> RoundKind:
        state["turn"] += 1
        return state["kinds"][turns[state["turn"] % len(turns)] % len(state["kinds"])]

    monkeypatch.setattr(Chooser, "__init__", remembers)
    monkeypatch.setattr(Chooser, "choose", choose)


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Prompts that repeat themselves, left-padded."""
    tokens, mask = padded_prompts(nested_model(), [0, 6, 2][:batch], 12)
    tokens[:, 6:] = tokens[:, 6:9].repeat(1, 2)
    return tokens, mask


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.usefixtures("any_kind")
def test_greedy_tokens_are_those_of_the_target_alone(name: str, batch: int) -> None:
    model = nested_model()
    tokens, mask = prompts(batch)
    options = {"attention_mask": mask, "max_new_tokens": NEW}
    whole = run(model, tokens, 0, **options).sequences
    output = run(model, tokens, **OPTIONS[name], **options)
    assert torch.equal(output.sequences, whole)
    check_metrics(output.metrics, batch * NEW)
    if name == "all":
        assert len(output.metrics.rounds_per_gamma) > 3
        assert output.metrics.lookups > 0
    # Ends within blocks, by length and by tokens.
    for length in (1, 7, 16):
        cut = run(model, tokens, **OPTIONS[name], **options | {"max_new_tokens": length})
        assert torch.equal(cut.sequences, whole[:, : 12 + length])
    for column in (12 + 4, 12 + 13):
        ends: dict[str, Any] = {"eos_token_id": [int(whole[-1, column])], "pad_token_id": PAD}
        expected = run(model, tokens, 0, **options, **ends)
        output = run(model, tokens, **OPTIONS[name], **options, **ends)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.metrics.tokens == expected.metrics.tokens


def check_metrics(metrics: Any, tokens: int) -> None:
    assert metrics.tokens == tokens
    drafts, accepted = metrics.drafts, metrics.accepted_per_position
    assert drafts == sorted(drafts, reverse=True)
    assert all(0 <= a <= d for a, d in zip(accepted, drafts, strict=True))
    assert sum(metrics.rounds_per_gamma.values()) == metrics.rounds
    assert sum(n * rounds for n, rounds in metrics.rounds_per_gamma.items()) == metrics.drafted
    assert metrics.slot_acceptance == metrics.accepted / metrics.drafted
    # A row's last round may offer more than there is room for.
    spare = metrics.rounds + metrics.accepted - tokens
    assert 0 <= spare <= metrics.batch * len(drafts)


def test_one_gamma_has_the_numbers_that_it_had() -> None:
    metrics = run(nested_model(), prompts(3)[0], 3).metrics
    assert metrics.drafted_per_position == [metrics.rounds] * 3
    assert metrics.drafted == 3 * metrics.rounds
    assert metrics.rounds_per_gamma == {3: metrics.rounds}
    assert "3 draft tokens a round" in metrics.summary()


def test_what_is_drafted_decides_the_speed_alone(
    draft_cost: list[float], kinds: list[RoundKind]
) -> None:
    model = nested_model()
    tokens, _ = prompts(1)
    expected = run(model, tokens, 0, max_new_tokens=80).sequences
    means = []
    for cost in (0.02, 0.15, 5.0):
        draft_cost[0] = cost
        kinds.clear()
        output = run(model, tokens, "auto", max_new_tokens=80)
        assert torch.equal(output.sequences, expected)
        assert output.metrics.gamma == "auto"
        assert [kind.tokens for kind in kinds] == recorded(output.metrics, kinds)
        late = kinds[6:]
        means.append(sum(kind.tokens for kind in late) / len(late))
    assert means[0] > means[1] > means[2]
    assert means[2] < 0.5


def recorded(metrics: Any, kinds: list[RoundKind]) -> list[int]:
    """Draft tokens of each round, if the counts of one row agree with them."""
    counts = {n: sum(kind.tokens == n for kind in kinds) for n in {k.tokens for k in kinds}}
    assert metrics.rounds_per_gamma == counts
    return [kind.tokens for kind in kinds]


def scrambled() -> PreTrainedModel:
    """A model whose draft says nothing of the target: one step of both planes, random codes."""
    model = nest_(small_models.build("llama-gqa"), overlap=1)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if isinstance(weight, NestedQuantTensor):
            for plane in (weight.base, weight.refinement):
                plane.copy_(torch.randint(256, plane.shape, generator=generator))
    return model


def test_a_useless_draft_is_left_out_and_tried_again(
    draft_cost: list[float], kinds: list[RoundKind]
) -> None:
    draft_cost[0] = 0.5
    model = scrambled()
    tokens = small_models.tokens(model, 1, 9)
    expected = run(model, tokens, 0, max_new_tokens=150).sequences
    assert run(model, tokens, 4, max_new_tokens=20).metrics.slot_acceptance < 0.2
    with pytest.warns(UserWarning, match=r"drafts do not pay here.* with probability 0\.") as said:
        output = run(model, tokens, "auto", max_new_tokens=150)
    assert len(said) == 1
    assert torch.equal(output.sequences, expected)
    drafting = [number for number, kind in enumerate(kinds) if kind.tokens]
    gaps = {later - earlier for earlier, later in itertools.pairwise(drafting)}
    assert RETRY_TOKENS + 1 in gaps
    assert max(gaps) == RETRY_TOKENS + 1
    assert len(drafting) < 0.2 * len(kinds)


def test_a_draft_that_becomes_good_is_taken_up(
    draft_cost: list[float], kinds: list[RoundKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nested_model()
    tokens, _ = prompts(1)
    expected = run(model, tokens, 0, max_new_tokens=140).sequences
    draft_cost[0] = 0.5

    def draft(self: Any, logits: Tensor, ids: Tensor, column: Tensor) -> Tensor:
        known = expected.gather(1, (column + 1).clamp(max=expected.shape[1] - 1))
        return torch.where(column < 60, (known + 1) % 97, known)

    monkeypatch.setattr(GreedySelection, "draft", draft)
    output = run(model, tokens, "auto", max_new_tokens=140)
    assert torch.equal(output.sequences, expected)
    assert all(kind.tokens for kind in kinds[-5:])
    assert kinds[-1].tokens >= 4


@pytest.mark.usefixtures("draft_cost")
def test_a_seed_reproduces_samples_where_times_are_the_same(kinds: list[RoundKind]) -> None:
    tokens, mask = prompts(3)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": True, "prompt_lookup": 4}

    def sampled(seed: int) -> tuple[Tensor, list[RoundKind]]:
        kinds.clear()
        output = run(nested_model(), tokens, "auto", seed=seed, max_new_tokens=50, **options)
        return output.sequences, list(kinds)

    first, other = sampled(5), sampled(6)
    assert torch.equal(sampled(5)[0], first[0])
    assert sampled(5)[1] == first[1]
    assert not torch.equal(other[0], first[0])
    assert len(set(first[1])) > 2


@pytest.mark.usefixtures("any_kind")
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}])
def test_rounds_as_graphs_run_them(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured before the call, over one state, with reports that come a round late."""
    tokens, mask = prompts(3)
    model = copy.deepcopy(nested_model())
    options = {"attention_mask": mask, "max_new_tokens": NEW, **options}
    plan: dict[str, Any] = {"gamma": "auto", "prompt_lookup": 10}
    expected = run(model, tokens, 0, **options).sequences
    captures: list[Any] = []

    def capture(self: Any, rounds: Any, lengths: tuple[int, int]) -> None:
        for kind in rounds if not self._graphs else ():
            rounds[kind](lengths[0])
            self._graphs[kind] = rounds[kind]
            captures.append(kind)

    monkeypatch.setattr(RoundGraphs, "capture", capture)
    monkeypatch.setattr(RoundGraphs, "replay", lambda self, kind, n: self._graphs[kind](n))
    monkeypatch.setattr(requests, "check_cuda_graph", lambda *_: True)
    monkeypatch.setattr(nestq.passes.backend, "traced", lambda model: model)
    for call in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Chooser, "choose", in_order())
            output = run(model, tokens, **plan, **options)
        assert output.metrics.in_graph
        if call or not options.get("do_sample"):
            assert torch.equal(output.sequences, expected)
        expected = output.sequences
        check_metrics(output.metrics, 3 * NEW)
        assert len(captures) == 7
        del output


def in_order() -> Any:
    """Kinds in turn, from the first on."""
    gammas, turn = (4, 0, 10, 2, 8, 1, 6), [0]

    def choose(self: Chooser, matches: float = 0.0) -> RoundKind:
        turn[0] += 1
        tokens = gammas[turn[0] % len(gammas)]
        return RoundKind(tokens, lookup=tokens == 10)

    return choose


SAMPLED: dict[str, dict[str, Any]] = {
    "auto": {"gamma": "auto"},
    "stop": {"gamma": 4, "draft_stop": 0.4},
    "lookup": {"gamma": 0, "prompt_lookup": 3},
    "auto and lookup": {"gamma": "auto", "prompt_lookup": 3},
}
COUNT = 1200


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize(("setting", "batch"), [("plain", 4), ("several", 1), ("presence", 1)])
@pytest.mark.usefixtures("any_kind")
def test_samples_have_the_distribution_of_the_target(name: str, setting: str, batch: int) -> None:
    new = samples(setting, batch=batch, count=COUNT // batch, seed=77, **SAMPLED[name])
    assert fit_p(new, setting) > LEAST_P
    assert same_p(new, target_samples(setting, batch, COUNT // batch)) > LEAST_P


def without_the_uncertain(self: StoppingRound, last: Tensor) -> Drafts:
    columns, per_row = draft(self, last)
    probabilities = torch.stack(self.selection._drafts, 1)
    tokens = self.state.ids.gather(1, last + torch.arange(1, columns + 1))
    chosen = probabilities.gather(2, tokens[..., None])[..., 0]
    uncertain = chosen.gather(1, per_row.clamp(min=1) - 1) < self.least
    return Drafts(columns, per_row - uncertain.long())


draft = StoppingRound.draft


def always_taken(self: Any, logits: Tensor, ids: Tensor, last: Tensor, drafts: Any = None) -> Any:
    tokens, accepted = verify(self, logits, ids, last, drafts)
    proposed = ids.gather(1, last + 1)
    accepted[:, :1] = True
    return torch.where(torch.arange(tokens.shape[1]) == 0, proposed, tokens), accepted


verify = SampledSelection.verify


def forgets_the_proposal(self: Any, target: Tensor, drafted: Tensor) -> Tensor:
    masses = distributions(self, target, drafted)
    return masses.masked_fill(masses == 1, 1e-9) if masses.shape[1] > 1 else masses


distributions = SampledSelection._draft_distributions


FAULTS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "the uncertain token is dropped": (
        StoppingRound, "draft", without_the_uncertain, {"gamma": 4, "draft_stop": 0.25},
    ),
    "what is looked up is always taken": (
        SampledSelection, "verify", always_taken, {"gamma": 0, "prompt_lookup": 3},
    ),
    "what is looked up is taken to be improbable": (
        SampledSelection, "_draft_distributions", forgets_the_proposal,
        {"gamma": 0, "prompt_lookup": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("any_kind")
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong, options = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong)
    new = samples("plain", batch=1, count=3 * COUNT, seed=2, **options)
    assert fit_p(new, "plain") < LEAST_P


def test_a_row_that_stops_is_what_its_prompt_gives_alone() -> None:
    tokens, mask = prompts(3)
    options: dict[str, Any] = {"draft_stop": 0.03, "do_sample": True, "max_new_tokens": NEW}
    model, seeds = nested_model(), [11, 12, 13]
    together = run(model, tokens, 4, attention_mask=mask, seed=seeds, **options)
    assert len(together.metrics.rounds_per_gamma) > 2
    alone_counts = []
    for row, seed in enumerate(seeds):
        start = 12 - int(mask[row].sum())
        alone = run(model, tokens[row : row + 1, start:], 4, seed=seed, **options)
        assert torch.equal(alone.sequences[0], together.sequences[row, start:])
        alone_counts.append(alone.metrics.drafts)
    assert [sum(d) for d in zip(*alone_counts, strict=True)] == together.metrics.drafts


@pytest.mark.parametrize(("least", "gammas"), [(0, {4}), (1, {1})])
def test_the_ends_of_stopping(least: float, gammas: set[int]) -> None:
    metrics = run(nested_model(), prompts(3)[0], 4, draft_stop=least).metrics
    assert set(metrics.rounds_per_gamma) == gammas


def test_drafting_ends_when_every_row_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def noted(self: StoppingRound, last: Tensor) -> Drafts:
        drafts = draft(self, last)
        unfinished = ~self.state.finished
        assert drafts.columns == int(drafts.per_row.max())
        assert (drafts.per_row[unfinished] >= 1).all()
        assert not drafts.per_row[~unfinished].any()
        steps.append(drafts.columns)
        return drafts

    monkeypatch.setattr(StoppingRound, "draft", noted)
    run(nested_model(), prompts(3)[0], 6, draft_stop=0.08, max_new_tokens=NEW)
    assert len(set(steps)) > 2


def test_looking_up_drafts_nothing_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chooser, "choose", lambda self, matches: RoundKind(5, lookup=True))
    monkeypatch.setattr(Round, "draft", None)
    assert LookupRound.draft is not None
    tokens, mask = prompts(3)
    metrics = run(nested_model(), tokens, 4, prompt_lookup=5, attention_mask=mask).metrics
    assert set(metrics.rounds_per_gamma) <= {0, 5}
    assert metrics.lookups == metrics.verifications
    assert metrics.accepted > 0


def test_transformers_generate_takes_the_options(kinds: list[RoundKind]) -> None:
    model, (tokens, mask) = nested_model(), prompts(1)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW}
    theirs = model.generate(
        tokens, custom_generate=generate.decode, gamma="auto", prompt_lookup=4, **options
    )
    assert torch.equal(theirs, run(model, tokens, 0, **options).sequences)
    assert kinds
