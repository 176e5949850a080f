"""Sampling by single steps."""

import pytest
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from nestq.speculative.sampling import (
    PURPOSES,
    SampledSelection,
    distribution,
    is_accepted,
    random_table,
    recovery_weights,
    row_streams,
    sample,
)
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import UNDEFINED

LARGEST = 1 - 2.0**-53


def at(uniform: float, weights: list[float]) -> int:
    token = sample(*(torch.tensor([x], dtype=torch.float64) for x in (weights, [uniform])))
    assert token.shape == (1, 1)
    return int(token)


def test_a_token_is_chosen_by_the_sum_of_the_weights_before_it() -> None:
    weights = [0.25, 0.0, 0.5, 0.25, 0.0]
    chosen = [at(u, weights) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, LARGEST)]
    assert chosen == [0, 0, 2, 2, 3, 3]
    assert at(0.5, [0, 0, 3, 0]) == 2  # weights need no sum of 1
    assert at(0.0, [0.0, 1e-300, 1.0]) == 1


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 1000])
def test_numbers_in_equal_steps_choose_tokens_by_their_weight(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 8
    weights[torch.rand(vocabulary, generator=generator) < 0.3] = 0
    weights[vocabulary // 2] = 1
    steps = 100000
    uniform = (torch.arange(steps, dtype=torch.float64)[:, None] + 0.5) / steps
    tokens = [sample(weights.expand(1000, -1), part)[:, 0] for part in uniform.split(1000)]
    assert torch.equal(torch.cat(tokens), torch.cat(tokens).sort()[0])
    counts = torch.cat(tokens).bincount(minlength=vocabulary)
    assert not counts[weights == 0].any()
    # The ends of a token's interval may each be off by one step.
    assert (counts - weights / weights.sum() * steps).abs().max() < 1.001


def test_a_distribution_is_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 20 * torch.randn(3, 4, 1000, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -torch.inf
    given = distribution(scores)
    expected = scores.double().softmax(-1)
    assert torch.equal(given == 0, expected == 0)
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=0)
    # Its bits do not depend on other rows.
    for row in range(3):
        for i in range(4):
            assert torch.equal(distribution(scores[row : row + 1, i : i + 1])[0, 0], given[row, i])


def test_tokens_of_weight_zero_are_never_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(5000, 40, generator=generator, dtype=torch.float64)
    weights *= 10 ** torch.randint(-300, 10, (5000, 1), generator=generator).double()
    weights[torch.rand(5000, 40, generator=generator) < 0.8] = 0
    weights[:, 7] += (weights.sum(1) == 0).double()
    for uniform in (0.0, 1e-300, 0.5, LARGEST):
        token = sample(weights, torch.full((5000, 1), uniform, dtype=torch.float64))
        assert (weights.gather(1, token) > 0).all()
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).to(torch.uint8).argmax(1)
    assert torch.equal(token[:, 0], last)


def test_weights_that_are_nan_give_some_token() -> None:
    assert 0 <= at(0.5, [torch.nan] * 5) < 5


def test_equal_probabilities_are_always_accepted_and_zero_never() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(100000, generator=generator, dtype=torch.float64) ** 20
    largest = torch.full_like(p, LARGEST)
    assert is_accepted(p, p, largest).all()
    assert is_accepted(2 * p, p, largest).all()
    assert not is_accepted(p * (1 - 1e-15), p, largest).any()
    assert not is_accepted(torch.zeros_like(p), p, torch.zeros_like(p)).any()
    for broken in ((p * torch.nan, p), (p, p * torch.nan)):
        assert not is_accepted(*broken, torch.zeros_like(p)).any()


def test_weights_of_recovery() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]]).double()
    q = torch.tensor([[0.2, 0.3, 0.5]]).double()
    assert recovery_weights(p, q).tolist() == [[pytest.approx(0.3), 0.0, 0.0]]
    for other in (p, torch.zeros_like(p), p * torch.nan):
        assert torch.equal(recovery_weights(p, other), p)


def selection(table: Tensor) -> SampledSelection:
    return SampledSelection(ProcessedScores(LogitsProcessorList(), table.device), table)


def one_round(
    drafts: Tensor, targets: Tensor, table: Tensor, last: Tensor
) -> tuple[SampledSelection, Tensor, Tensor, Tensor]:
    """Draft from logits ``[gamma, B, 1, V]`` and verify; what came of it, and the draft tokens."""
    made, ids = selection(table), torch.zeros(table.shape[:2], dtype=torch.int64)
    for step, logits in enumerate(drafts):
        ids.scatter_(1, last + step + 1, made.draft(logits, ids, last + step))
    drafted = ids.gather(1, last + 1 + torch.arange(len(drafts)))
    return made, *made.verify(targets, ids, last), drafted


def test_a_round_by_hand() -> None:
    table = torch.full((2, 12, PURPOSES), 0.5, dtype=torch.float64)
    last = torch.tensor([[2], [5]])
    draft, target = torch.tensor([0.4, 0.6]).log(), torch.tensor([0.8, 0.2]).log()
    # The draft takes token 1; it is accepted if the number is below 0.2 / 0.6.
    table[0, 3:5, 1] = 0.3
    table[1, 6, 1] = 0.3
    table[1, 7, 1] = 0.4
    _, tokens, accepted, drafted = one_round(
        draft.expand(3, 2, 1, 2), target.expand(2, 4, 2), table, last
    )
    assert drafted.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert accepted.tolist() == [[True, True, False], [True, False, False]]
    assert tokens[0, :3].tolist() == [1, 1, 0]
    assert tokens[1, :2].tolist() == [1, 0]
    # All accepted: the bonus token has its own number.
    table[:, :, 1], table[0, 6, 3], table[1, 9, 3] = 0.0, 0.7, 0.9
    _, tokens, accepted, _ = one_round(
        draft.expand(3, 2, 1, 2), target.expand(2, 4, 2), table, last
    )
    assert accepted.all()
    assert tokens.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_equal_distributions_accept_everything(gamma: int) -> None:
    generator = torch.Generator().manual_seed(gamma)
    logits = torch.randn(500, gamma + 1, 30, generator=generator) * 3
    last = torch.randint(3, 9, (500, 1), generator=generator)
    table = random_table(row_streams(3, None, 500), 20, torch.zeros_like(last))
    drafts = logits[:, :gamma, None].transpose(0, 1)
    _, tokens, accepted, drafted = one_round(drafts, logits, table, last)
    assert accepted.shape == (500, gamma)
    assert accepted.all()
    assert torch.equal(tokens[:, :-1], drafted)
    expected = sample(
        distribution(logits)[:, -1],
        table[torch.arange(500), last[:, 0] + gamma + 1][:, 3:],
    )
    assert torch.equal(tokens[:, -1:], expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_cannot_be_sampled_from(bad: float) -> None:
    logits = torch.zeros(3, 3, 8)
    table = random_table(row_streams(3, None, 3), 20, torch.zeros(3, 1, dtype=torch.int64))
    last = torch.tensor([[4], [5], [6]])
    drafts = torch.zeros(2, 3, 1, 8)
    logits[1, 1] = bad
    _, tokens, accepted, _ = one_round(drafts, logits, table, last)
    assert accepted.tolist() == [[True, True], [True, False], [True, True]]
    assert tokens[1, 1] == UNDEFINED
    assert (tokens[::2] >= 0).all()


def test_scores_behind_a_rejected_token_do_not_matter() -> None:
    table = torch.full((1, 9, PURPOSES), 0.5, dtype=torch.float64)
    logits = torch.zeros(1, 3, 4)
    logits[0, 0] = torch.tensor([0.0, 0.0, -torch.inf, 0.0])  # the draft takes token 2
    logits[0, 1:] = torch.nan
    _, tokens, accepted, drafted = one_round(
        torch.zeros(2, 1, 1, 4), logits, table, torch.tensor([[1]])
    )
    assert drafted[0, 0] == 2
    assert not accepted.any()
    assert tokens[0, 0] >= 0


WARPERS = LogitsProcessorList(
    [
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(5),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.1),
        TypicalLogitsWarper(0.9),
        EpsilonLogitsWarper(0.01),
        LogitNormalization(),
    ]
)


class AsksTheHost(LogitsProcessor):
    """Looks at a number."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if scores.max() > 0 else -scores


def round_without_values(processors: LogitsProcessorList) -> Tensor:
    """A round of tensors that have a shape and no numbers."""
    device = torch.device("meta")
    made = SampledSelection(
        ProcessedScores(processors, device), torch.empty(2, 12, PURPOSES, device=device).double()
    )
    made.scores.waits = False
    ids = torch.zeros(2, 12, dtype=torch.int64, device=device)
    last = torch.zeros(2, 1, dtype=torch.int64, device=device)
    ids.scatter_(1, last + 1, made.draft(torch.empty(2, 1, 20, device=device), ids, last))
    tokens, accepted = made.verify(torch.empty(2, 2, 20, device=device), ids, last)
    assert accepted.shape == (2, 1)
    return tokens


def test_a_round_needs_no_number_on_the_host() -> None:
    """So that it can be captured as a graph."""
    assert not ProcessedScores(WARPERS, torch.device("cpu")).waits
    assert round_without_values(WARPERS).shape == (2, 2)
    with pytest.raises(RuntimeError, match="meta"):
        round_without_values(LogitsProcessorList([AsksTheHost()]))


def test_a_call_takes_over_random_numbers() -> None:
    pads = torch.zeros(2, 1, dtype=torch.int64)
    first, second = (
        selection(random_table(row_streams(seed, None, 2), 6, pads)) for seed in (1, 2)
    )
    assert first.key == second.key
    address = first._table.data_ptr()
    first.begin(second)
    assert first._table.data_ptr() == address
    assert torch.equal(first._table, second._table)


def test_random_numbers_are_counted_by_position() -> None:
    pads = torch.tensor([[0], [3]])
    table = random_table(([5, 6], [0, 0]), 10, pads)
    alone = random_table(([6], [0]), 7, pads[:1])
    assert torch.equal(table[1, 3:], alone[0])
    assert not torch.equal(table[0, :7], alone[0])
