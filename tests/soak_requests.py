"""Random requests for a tiny model, some of which are cut off by an exception."""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import small_models
import torch
from nested_models import nest_
from speculative_runs import PAD, padded_prompts
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from nestq.kv_cache import NestedKVCache, cache_keyword
from nestq.speculative import speculative_generate

VOCABULARY = 31
CAPACITY = 48
# What may be cut off, and where from.
CUTS = (None, None, None, "streamer", "processor", "criterion")
# Two are exceptions, and one is none: what Ctrl-C raises.
ERRORS = (RuntimeError, ValueError, KeyboardInterrupt)


@cache
def tiny_model() -> PreTrainedModel:
    """One layer, 31 tokens, no end-of-sequence token."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    model = nest_(small_models.build("llama-gqa", vocab_size=VOCABULARY, **sizes))
    model.generation_config.eos_token_id = None
    return model


@dataclass(frozen=True)
class Request:
    """One call. With the same fields it gives the same tokens, or is cut off again."""

    seed: int
    pads: tuple[int, ...]
    width: int
    gamma: int | str
    options: dict[str, Any]
    stops_at_sum: bool
    processed: bool
    given_cache: bool
    cut: str | None
    after: int
    error: type[BaseException]
    row: int | None = None
    """The only row that is asked for, without its padding; None for all."""

    @property
    def greedy(self) -> bool:
        """Whether any gamma gives the same tokens."""
        return not self.options["do_sample"] and self.cut is None


def random_request(seed: int) -> Request:
    """A request that depends on the seed alone."""
    draw = random.Random(seed)
    width = draw.randint(1, 12)
    batch = draw.choice((1, 1, 2, 3))
    options: dict[str, Any] = {
        "max_new_tokens": draw.randint(1, 8),
        "do_sample": draw.random() < 0.4,
        "kv": draw.choice(("kv8/kv8", "kv4/kv8", "recent(3)", "auto(6)")),
        "eos_token_id": draw.choice((None, draw.sample(range(VOCABULARY), 3))),
        "pad_token_id": PAD,
        "prefill_chunk_size": draw.choice((None, 4)),
    }
    if options["do_sample"]:
        options |= {"temperature": draw.choice((0.7, 1.3)), "top_k": draw.choice((5, 20))}
        options["seed"] = draw.choice((seed, [seed + row for row in range(batch)]))
    if draw.random() < 0.3:
        options["repetition_penalty"] = 1.3
    return Request(
        seed=seed,
        pads=tuple(draw.randint(0, width - 1) for _ in range(batch)),
        width=width,
        gamma=draw.randint(0, 5),
        options=options,
        stops_at_sum=draw.random() < 0.3,
        processed=draw.random() < 0.2,
        given_cache=draw.random() < 0.3,
        cut=draw.choice(CUTS),
        after=draw.randint(1, 5),
        error=draw.choice(ERRORS),
    )


def with_another_gamma(request: Request) -> Request:
    """What gives the same tokens in another way; the request itself if there is none."""
    if not request.greedy:
        return request
    if request.seed % 5:
        return replace(request, gamma=(int(request.gamma) + 2) % 6)
    return replace(request, gamma="auto", options=request.options | {"prompt_lookup": 3})


def row_alone(request: Request, row: int) -> Request:
    """One row of a batch: a request of its own."""
    options = dict(request.options)
    if options["do_sample"]:
        options["seed"] = [options["seed"][row]]
    return replace(request, row=row, options=options)


def prompts_of(request: Request) -> tuple[Tensor, Tensor]:
    """Token ids and mask ``[B, n]``, other ones than other requests have."""
    prompts, mask = padded_prompts(tiny_model(), list(request.pads), request.width)
    prompts = (prompts + request.seed * mask) % VOCABULARY
    if request.row is None:
        return prompts, mask
    row = slice(request.row, request.row + 1), slice(request.pads[request.row], None)
    return prompts[row], mask[row]


@dataclass
class Cut:
    """Raises at the call number ``after``."""

    after: int
    error: type[BaseException]
    calls: int = field(default=0)

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.after:
            raise self.error("cut off")


class Streamer(BaseStreamer):
    def __init__(self, cut: Cut | None) -> None:
        self.cut = cut
        self.columns: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        if self.cut is not None:
            self.cut()
        self.columns += [value.tolist()] if value.dim() == 1 else value.T.tolist()

    def end(self) -> None:
        self.ended += 1


class Processor(LogitsProcessor):
    """Bans every third token, depending on the context."""

    def __init__(self, cut: Cut | None) -> None:
        self.cut = cut

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.cut is not None:
            self.cut()
        tokens = torch.arange(scores.shape[1])
        return scores.masked_fill((input_ids.sum(1, keepdim=True) + tokens) % 3 == 0, -torch.inf)


class Criterion(StoppingCriteria):
    """Ends a row where the sum of its ids is a multiple of 7."""

    def __init__(self, cut: Cut | None) -> None:
        self.cut = cut

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self.cut is not None:
            self.cut()
        return input_ids.sum(1) % 7 == 0


def answer(
    model: PreTrainedModel, request: Request, caches: dict[int, NestedKVCache] | None = None
) -> list[list[int]] | str:
    """The sequences of a request, or the name of the error that cut it off.

    Args:
        model: tiny and nested.
        request: the call.
        caches: given caches by batch size, which calls take over from each other; None for none.
    """
    prompts, mask = prompts_of(request)
    cut = None if request.cut is None else Cut(request.after, request.error)
    streamer = Streamer(cut if request.cut == "streamer" else None)
    options = dict(request.options)
    if request.processed or request.cut == "processor":
        processor = Processor(cut if request.cut == "processor" else None)
        options["logits_processor"] = LogitsProcessorList([processor])
    if request.stops_at_sum or request.cut == "criterion":
        criterion = Criterion(cut if request.cut == "criterion" else None)
        options["stopping_criteria"] = StoppingCriteriaList([criterion])
    if request.given_cache and caches is not None:
        batch = len(prompts)
        policy = options.pop("kv")
        cache = caches.get(batch)
        if cache is None or str(cache.policy) != policy:
            cache = caches[batch] = NestedKVCache(model.config, CAPACITY, batch, policy=policy)
        cache.reset()
        options[cache_keyword(model)] = cache
    try:
        output = speculative_generate(
            model, prompts, attention_mask=mask, gamma=request.gamma, streamer=streamer, **options
        )
    except request.error as error:
        if str(error) != "cut off":
            raise
        return request.error.__name__
    finally:
        assert streamer.ended == 1
    assert isinstance(output, Tensor)
    assert torch.equal(torch.tensor(streamer.columns).T, output)
    return output.tolist()
