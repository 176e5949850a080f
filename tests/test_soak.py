"""Many random calls, some cut off by exceptions: nothing leaks, and nothing is carried over."""

import copy
import gc
import random
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from soak_requests import (
    Request,
    answer,
    random_request,
    row_alone,
    tiny_model,
    with_another_gamma,
)
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache
from nestq.view import current_view

# Objects that a call may leave behind, on average: less than one for each kind of request.
OBJECTS_A_CALL = 0.1
PASSES = 3


def assert_nothing_is_left_set(model: PreTrainedModel) -> None:
    assert current_view() == "target"
    assert not _get_current_function_mode_stack()
    assert torch.is_grad_enabled()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks


def alive() -> tuple[int, int, int]:
    """Tensors, their bytes, and all objects that the garbage collector knows."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [thing for thing in objects if issubclass(type(thing), torch.Tensor)]
    return len(tensors), sum(t.numel() * t.element_size() for t in tensors), len(objects)


def soak(model: PreTrainedModel, requests: list[Request]) -> dict[int, object]:
    """Answers by the requests' seeds; the calls take over caches from each other."""
    caches: dict[int, NestedKVCache] = {}
    answers: dict[int, object] = {}
    for request in requests:
        answers[request.seed] = answer(model, request, caches)
        assert_nothing_is_left_set(model)
    return answers


def check_orders_and_leaks(seeds: range) -> None:
    """Answers depend on the request alone, and calls leave nothing behind."""
    requests = [random_request(seed) for seed in seeds]
    model = tiny_model()
    expected = soak(model, requests)
    # Both ways to end are there, and all three errors that cut calls off.
    assert {type(value) for value in expected.values()} == {list, str}

    others = [with_another_gamma(request) for request in requests]
    random.Random(seeds.start).shuffle(others)
    fresh = copy.deepcopy(model)
    assert soak(fresh, others) == expected
    soak(fresh, others[:3])  # what is allocated on first use
    growth = []
    for _ in range(PASSES):
        before = alive()
        assert soak(fresh, others) == expected
        growth.append([now - then for now, then in zip(alive(), before, strict=True)])
    assert [tensors_and_size[:2] for tensors_and_size in growth] == [[0, 0]] * PASSES
    # What else the process does, such as an import, may add objects once. A leak adds them always.
    assert min(objects for _, _, objects in growth) < OBJECTS_A_CALL * len(requests)


def in_a_process_of_its_own(seeds: range) -> None:
    """What other tests of a process left running makes objects too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(check_orders_and_leaks, seeds).result()


def test_requests_in_any_order() -> None:
    in_a_process_of_its_own(range(30))


@pytest.mark.full
@pytest.mark.parametrize("start", range(1000, 5000, 400))
def test_ten_thousand_requests(start: int) -> None:
    """Each block answers 334 requests five times: 16,700 calls in all."""
    in_a_process_of_its_own(range(start, start + 334))


def test_threads_do_not_disturb_each_other() -> None:
    """Calls that are cut off among them."""
    check_threads(range(40, 52))


@pytest.mark.full
def test_many_requests_of_threads() -> None:
    check_threads(range(6000, 7000))


def check_threads(seeds: range) -> None:
    requests = [random_request(seed) for seed in seeds]
    model = tiny_model()
    expected = [answer(model, request) for request in requests]
    assert {type(value) for value in expected} == {list, str}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: answer(model, request), requests))
    assert answers == expected
    assert_nothing_is_left_set(model)


def test_rows_of_batches_are_the_requests_alone() -> None:
    requests = [random_request(seed) for seed in range(100, 160)]
    batches = [request for request in requests if has_independent_rows(request)]
    assert len(batches) > 4
    for request in batches:
        together = answer(tiny_model(), request)
        for row, pad in enumerate(request.pads):
            alone = answer(tiny_model(), row_alone(request, row))
            assert together[row][pad : pad + len(alone[0])] == alone[0]


def has_independent_rows(request: Request) -> bool:
    """Whether rows are to be as alone: with a seed each, and no processor that penalizes pads."""
    return (
        len(request.pads) > 1
        and request.cut is None
        and not isinstance(request.options.get("seed"), int)
        and "repetition_penalty" not in request.options
    )
