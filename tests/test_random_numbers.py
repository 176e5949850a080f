import pytest
import torch
from sampling_runs import LEAST_P, chi_square_p
from torch import Tensor

from nestq.speculative.random_numbers import philox, uniforms


def words(text: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    """The ones published with the generator (Random123, philox4x32 with 10 rounds)."""
    assert philox(words(counter), words(key)) == words(expected)


def table(seed: int = 1, rows: int = 100, columns: int = 500) -> Tensor:
    seeds, positions = torch.full((rows,), seed), torch.arange(columns).expand(rows, -1)
    return uniforms(seeds, torch.arange(rows), positions, 4)


def test_numbers_are_multiples_of_a_power_of_two_below_one() -> None:
    numbers = table()
    assert numbers.dtype == torch.float64
    assert numbers.shape == (100, 500, 4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    scaled = numbers * 2.0**53
    assert torch.equal(scaled, scaled.round())
    assert (scaled.long() % 2).double().mean() == pytest.approx(0.5, abs=0.01)
    assert len(numbers.flatten().unique()) == numbers.numel()


def test_numbers_are_uniform() -> None:
    numbers = table()
    count = numbers.numel()
    # Mean and variance of a uniform number, to five standard deviations.
    assert numbers.mean() == pytest.approx(1 / 2, abs=5 * (1 / 12 / count) ** 0.5)
    assert numbers.var() == pytest.approx(1 / 12, abs=5 * (1 / 180 / count) ** 0.5)
    for purpose in numbers.unbind(-1):
        counts = (purpose * 256).long().flatten().bincount(minlength=256).double()
        expected = purpose.numel() / 256
        assert chi_square_p(float(((counts - expected) ** 2 / expected).sum()), 255) > LEAST_P


def pairs_p(first: Tensor, second: Tensor) -> float:
    """p-value of the independence of two uniform numbers."""
    counts = ((first * 16).long() * 16 + (second * 16).long()).flatten().bincount(minlength=256)
    expected = first.numel() / 256
    return chi_square_p(float(((counts - expected) ** 2 / expected).sum()), 255)


def test_numbers_of_rows_positions_purposes_and_seeds_are_independent() -> None:
    numbers = table()
    assert pairs_p(numbers[1:], numbers[:-1]) > LEAST_P
    assert pairs_p(numbers[:, 1:], numbers[:, :-1]) > LEAST_P
    assert pairs_p(numbers[1:, :-1], numbers[:-1, 1:]) > LEAST_P
    for distance in (1, 2, 3):
        assert pairs_p(numbers, numbers.roll(distance, -1)) > LEAST_P
    for seed in (2, 3, 1 + 2**32, 1 + 2**62):
        assert pairs_p(numbers, table(seed)) > LEAST_P
    assert pairs_p(numbers, numbers) < LEAST_P  # the test can fail


def test_a_number_depends_on_its_own_counters_alone() -> None:
    numbers = table()
    assert torch.equal(numbers, table())
    assert torch.equal(numbers[:7, :30], table(rows=7, columns=30))
    one = uniforms(torch.tensor([1]), torch.tensor([41]), torch.tensor([[322]]), 4)
    assert torch.equal(one[0, 0], numbers[41, 322])
    assert torch.equal(one[..., :2], uniforms(*map(torch.tensor, ([1], [41], [[322]])), 2))
