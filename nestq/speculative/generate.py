"""Self-speculative decoding through transformers' ``generate``."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from nestq.architectures import unwrap
from nestq.attention import nested_attention_implementation
from nestq.kv_cache import NestedKVCache
from nestq.kv_policy import KVPolicy
from nestq.speculative import requests
from nestq.speculative.metrics import DecodingMetrics, Stopwatch
from nestq.speculative.round import NestedForward, draft, prefill, verify
from nestq.speculative.selection import GreedySelection
from nestq.speculative.stopping import Stopping

DEFAULT_POLICY = KVPolicy("kv8")
_CACHE_FIELD = next(
    field.name
    for field in dataclasses.fields(GenerateDecoderOnlyOutput)
    if field.name in requests.CACHES
)


@dataclasses.dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What is returned with ``return_dict_in_generate=True``.

    Attributes:
        sequences: int64 ``[B, columns]``, prompts and new tokens.
        cache: the ``NestedKVCache`` (``past_key_values`` in older versions of transformers).
        metrics: acceptance and times of the call.
    """

    metrics: DecodingMetrics | None = None


def speculative_generate(
    model: Any,
    inputs: Tensor | None = None,
    *,
    gamma: int = 4,
    kv: str | KVPolicy | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generate_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Generate greedily, drafting with the base planes and verifying with both.

    The tokens are those that the target view generates alone (``gamma=0``, autoregressive decoding
    in the same engine). Prompts, lengths, processors, stopping criteria and the form of the output
    are transformers' own: this is ``model.generate`` with another decoding loop.

    Threads may decode with one model at the same time. Until they end, its other forward passes
    raise TypeError: decoding sets the attention implementation in the model's config.

    Args:
        model: a transformers causal language model with nested weights, or ``torch.compile`` of
            one: the compiled module then computes.
        inputs: int64 ``[B, n]`` token ids, left-padded; ``input_ids=`` is the same.
        gamma: draft tokens a round, 0 to 16.
        kv: what drafts read of the cache, for example ``"kv4/kv8"``; default ``"kv8/kv8"``, or the
            policy of a ``cache`` that is given.
        streamer: gets the prompt and, as soon as they are accepted, the tokens; its ``end`` is
            called when the call ends, with an error too.
        tokenizer: needed for ``stop_strings``.
        **generate_kwargs: of ``model.generate``: ``attention_mask``, ``max_new_tokens``,
            ``eos_token_id``, ``stop_strings``, ``repetition_penalty``,
            ``return_dict_in_generate`` and so on. A model whose generation config samples by
            default needs ``do_sample=False``.

    Returns:
        int64 ``[B, columns]``, prompts and new tokens, shorter rows filled with the pad token; a
        :class:`SpeculativeOutput` with ``return_dict_in_generate=True``.

    Raises:
        ValueError: an argument or option is wrong or not supported; nothing was computed.
    """
    requests.check_streamer(streamer)
    try:
        original = unwrap(model)
        requests.check_gamma(gamma)
        requests.check_model(original)
        requests.check_keywords(generate_kwargs)
        option = partial(_option, generate_kwargs, original.generation_config)
        requests.check_options(option)
        if kv is not None:
            KVPolicy.parse(kv)
        prompts = generate_kwargs.get("input_ids") if inputs is None else inputs
        if prompts is not None:
            requests.check_prompts(original, prompts, generate_kwargs.get("attention_mask"))
        if option("stop_strings") is not None:
            generate_kwargs |= _stop_strings_as_criteria(option, tokenizer)
        loop = partial(decode, gamma=gamma, kv=kv, streamer=streamer, forward=model)
        return original.generate(inputs, custom_generate=loop, streamer=streamer, **generate_kwargs)
    finally:
        if streamer is not None:
            streamer.end()


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    gamma: int = 4,
    kv: str | KVPolicy | None = None,
    streamer: BaseStreamer | None = None,
    forward: Callable[..., Any] | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The decoding loop, for ``model.generate(..., custom_generate=nestq.decode, gamma=4)``.

    Transformers calls it with what ``generate`` prepared, and keeps some arguments of ``generate``
    to itself. A streamer and a tokenizer do not come here: for streaming and stop strings use
    :func:`speculative_generate`. Nor do ``assistant_model``, ``negative_prompt_ids``,
    ``negative_prompt_attention_mask`` and ``synced_gpus``: they are ignored on this way, while
    :func:`speculative_generate` refuses them.

    Args:
        model: the model whose ``generate`` was called.
        input_ids: int64 ``[B, n]``.
        logits_processor: applied at every position, for draft and target alike.
        stopping_criteria: applied to every accepted token.
        generation_config: of the call.
        gamma: draft tokens a round, 0 to 16.
        kv: as in :func:`speculative_generate`.
        streamer: gets the new tokens, ``[B]`` at a time; ``end`` is left to its owner.
        forward: called in place of ``model``: what ``torch.compile`` made of it.
        **model_kwargs: what else ``generate`` prepared.

    Returns:
        As :func:`speculative_generate`.
    """
    requests.check_gamma(gamma)
    requests.check_model(model)
    requests.check_options(lambda name: getattr(generation_config, name, None))
    requests.check_inputs(model_kwargs)
    requests.check_prompts(model, input_ids, model_kwargs.get("attention_mask"))
    batch, width = input_ids.shape
    requests.check_processors(logits_processor, batch)
    stopping = Stopping(stopping_criteria)
    pad_token = _pad_token(generation_config, stopping, batch)
    tokens = input_ids.to(model.device)
    pads = requests.count_pads(tokens, model_kwargs)
    columns = stopping.max_length + gamma + 1
    requests.check_context(model.config, stopping.max_length - int(pads.min()))
    requests.check_rotary(model.config, width - 1 - int(pads.max()), columns - int(pads.min()))
    cache = _cache(model, model_kwargs, kv, batch, columns)

    ids = torch.full((batch, columns), pad_token, device=model.device)
    ids[:, :width] = tokens
    chunk = generation_config.prefill_chunk_size or width
    with nested_attention_implementation(model):
        nested = NestedForward(model, model if forward is None else forward, cache, pads)
        select = GreedySelection(logits_processor)
        stream = _ColumnStream(streamer, width)
        metrics = _decode_rounds(
            nested, ids, width, pad_token, gamma, chunk, select, stopping, stream
        )
    sequences = ids[:, : int(nested.last().max()) + 1].to(input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {_CACHE_FIELD: cache, "sequences": sequences, "metrics": metrics}
    return SpeculativeOutput(**fields)


def _decode_rounds(
    model: NestedForward,
    ids: Tensor,
    width: int,
    pad_token: int,
    gamma: int,
    chunk: int,
    select: GreedySelection,
    stopping: Stopping,
    stream: "_ColumnStream",
) -> DecodingMetrics:
    """Complete the prompts in the first ``width`` columns of ``ids``, in place.

    The prefill leaves out the last token of the prompt: it begins the first round, so that every
    new token comes from a round.
    """
    watch = Stopwatch(ids.device)
    offsets = torch.arange(1, gamma + 2, device=ids.device)
    finished = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    rounds = torch.zeros((), dtype=torch.int64, device=ids.device)
    accepted_per_position = torch.zeros(gamma, dtype=torch.int64, device=ids.device)
    verifications = 0

    with watch("prefill"):
        prefill(model, ids[:, : width - 1], chunk)
    while not finished.all():
        last = model.last()
        with watch("draft"):
            draft(model, ids, last, gamma, select)
        with watch("verification"):
            tokens, accepted = verify(model, ids, last, gamma, select)
        accepted &= ~finished[:, None]
        accepted_per_position += accepted.sum(0)
        rounds += (~finished).sum()
        verifications += 1

        ids.scatter_(1, last + offsets, tokens)
        count = (accepted.sum(1) + 1).masked_fill(finished, 0)
        kept, ended = stopping(ids, tokens, last, count)
        ids.scatter_(1, last + offsets, tokens.masked_fill(offsets > kept[:, None], pad_token))
        model.cache.lengths += kept
        finished |= ended
        stream.send(ids, model.last(), finished)

    return DecodingMetrics(
        gamma=gamma,
        batch=len(ids),
        rounds=int(rounds),
        verifications=verifications,
        accepted_per_position=accepted_per_position.tolist(),
        tokens=int((model.last() + 1 - width).sum()),
        **watch.seconds(),
    )


class _ColumnStream:
    """Gives a streamer new tokens as transformers does: one column of the batch at a time.

    A column is sent when every row has it; a finished row has padding.
    """

    def __init__(self, streamer: BaseStreamer | None, width: int) -> None:
        self.streamer = streamer
        self.sent = width

    def send(self, ids: Tensor, last: Tensor, finished: Tensor) -> None:
        if self.streamer is None:
            return
        known = last[:, 0] + 1
        unfinished = known[~finished]
        ready = int(unfinished.min() if len(unfinished) else known.max())
        for column in ids[:, self.sent : ready].T.cpu():
            self.streamer.put(column)
        self.sent = max(self.sent, ready)


def _cache(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    kv: str | KVPolicy | None,
    batch: int,
    columns: int,
) -> NestedKVCache:
    """The user's cache, or a new one in place of what transformers made."""
    policy = None if kv is None else KVPolicy.parse(kv)
    for given in (model_kwargs.get(name) for name in requests.CACHES):
        if getattr(given, "_is_user_defined", False):
            return requests.check_cache(given, policy, batch, columns, model.device)
    config = model.config.get_text_config(decoder=True)
    return NestedKVCache(config, columns, batch, model.device, policy or DEFAULT_POLICY)


def _pad_token(config: GenerationConfig, stopping: Stopping, batch: int) -> int:
    """What fills finished rows: as in transformers the pad token, else the first end token."""
    candidates = [config.pad_token_id, config.eos_token_id]
    token = next((token for token in candidates if token is not None), None)
    if token is None and batch > 1 and not stopping.rows_end_together:
        raise ValueError(
            "pad_token_id must be given for a batch whose rows may end at different lengths"
        )
    return int(torch.tensor(0 if token is None else token).flatten()[0])


def _option(generate_kwargs: dict[str, Any], defaults: GenerationConfig, name: str) -> Any:
    """Value of a generation option: keywords win over a config, and that over the model's own."""
    if name in generate_kwargs:
        return generate_kwargs[name]
    value = getattr(generate_kwargs.get("generation_config"), name, None)
    return getattr(defaults, name, None) if value is None else value


def _stop_strings_as_criteria(
    option: Callable[[str], Any], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Keywords of ``generate`` that stop at strings; it would not see the tokenizer itself."""
    strings = option("stop_strings")
    listed = [strings] if isinstance(strings, str) else strings
    if not (isinstance(listed, list) and listed and all(isinstance(s, str) and s for s in listed)):
        raise ValueError(
            "stop_strings must be a string or a list of strings, none of them empty, "
            f"got {strings!r}"
        )
    if tokenizer is None:
        raise ValueError("tokenizer must be given with stop_strings, got None")
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=listed)
    given = option("stopping_criteria") or []
    return {"stop_strings": None, "stopping_criteria": StoppingCriteriaList([*given, criterion])}
