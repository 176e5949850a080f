"""Planes that lie next to each other are one plane, and no others are."""

import pytest
import torch
from nested_tensors import random

from nestq.neighbours import merged


@pytest.mark.parametrize("shape", [(10,), (10, 3), (10, 3, 4)])
def test_parts_of_one_buffer_are_merged_without_a_copy(shape: tuple[int, ...]) -> None:
    buffer = random(*shape)
    for parts in (buffer.split([2, 5, 3]), buffer.split([10]), buffer.split([0, 4, 0, 6])):
        whole = merged(parts)
        assert whole is not None
        assert torch.equal(whole, buffer)
        assert whole.data_ptr() == buffer.data_ptr()
    middle = merged(buffer.split([2, 5, 3])[1:])
    assert middle is not None
    assert torch.equal(middle, buffer[2:])


def test_what_is_not_adjacent_is_not_merged() -> None:
    buffer, other = random(10, 4), random(10, 4)
    one, two, three = buffer.split([2, 5, 3])
    for planes in (
        [one, three],
        [two, one],
        [one, one],
        [one, two, one],
        [one, two.clone()],
        [buffer, other],
        [one, two[:, :2]],
        [one, two.view(torch.int32)],
        [one, two.T],
        [one, two.view(-1)],
    ):
        assert merged(planes) is None
    columns = buffer.T.split([2, 2])
    whole = merged(columns)
    assert whole is not None
    assert torch.equal(whole, buffer.T)
