"""Self-speculative decoding through transformers' ``generate``."""

import dataclasses
from collections.abc import Callable, Sequence
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
from nestq.plane_placement import place_side_by_side_
from nestq.speculative import requests
from nestq.speculative.graphs import (
    Shape,
    addresses,
    capture_rounds,
    captured_decoding,
    round_up_columns,
)
from nestq.speculative.loop import ColumnStream, Transcript, complete
from nestq.speculative.metrics import DecodingMetrics, Stopwatch
from nestq.speculative.round import NestedForward, Round, prefill
from nestq.speculative.sampling import SampledSelection, random_table, row_streams
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection, Selection
from nestq.speculative.state import DecodingState
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
    cuda_graph: bool | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generate_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Generate text, drafting with the base planes and verifying with both.

    Greedy tokens are those that the target view generates alone (``gamma=0``, autoregressive
    decoding in the same engine); sampled tokens (``do_sample=True``) have the distribution that the
    target's have. Prompts, lengths, processors, stopping criteria and the form of the output are
    transformers' own: this is ``model.generate`` with another decoding loop.

    Samples are reproducible: the same inputs, gamma and seed give the same tokens. A row's tokens
    do not depend on the other rows or on padding: with a list of seeds, a row is what its prompt
    gives alone with the row's seed. Both hold as far as the logits are the same bits, as they are
    on a CPU. Another gamma gives other tokens, of the same distribution.

    Threads may decode with one model at the same time. Until they end, its other forward passes
    raise TypeError: decoding sets the attention implementation in the model's config.

    Args:
        model: a transformers causal language model with nested weights, or ``torch.compile`` of
            one: the compiled module then computes.
        inputs: int64 ``[B, n]`` token ids, left-padded; ``input_ids=`` is the same.
        gamma: draft tokens a round, 0 to 16.
        kv: what drafts read of the cache, for example ``"kv4/kv8"``; default ``"kv8/kv8"``, or the
            policy of a ``cache`` that is given.
        cuda_graph: whether each round is one replay of a CUDA graph, which runs no Python of the
            model (hooks, for example); None for yes wherever it is possible: on one GPU, without
            logits processors other than temperature, top-k, top-p, min-p, typical and epsilon
            warpers and the repetition penalty. The first call of a batch size and length captures
            it, and later calls take it over, with its KV cache: see :func:`release_graphs`.
        seed: of the samples: an int from 0 to 2**64 - 1, from which every row gets random numbers
            of its own; or a list of ints, one for each row (each returned sequence), a prompt alone
            having the same with ``seed=s`` and ``seed=[s]``; or None to draw one from PyTorch's
            default generator, so that ``torch.manual_seed`` reproduces a run.
        generator: to draw the seed from, in place of PyTorch's default one.
        streamer: gets the prompt and, as soon as they are accepted, the tokens; its ``end`` is
            called when the call ends, with an error too.
        tokenizer: needed for ``stop_strings``.
        **generate_kwargs: of ``model.generate``: ``attention_mask``, ``max_new_tokens``,
            ``eos_token_id``, ``stop_strings``, ``repetition_penalty``,
            ``do_sample``, ``temperature``, ``num_return_sequences``, ``return_dict_in_generate``
            and so on. A model's generation config may sample by default; ``do_sample=False``
            decodes greedily.

    Returns:
        int64 ``[B, columns]``, prompts and new tokens, shorter rows filled with the pad token; a
        :class:`SpeculativeOutput` with ``return_dict_in_generate=True``.

    Raises:
        ValueError: an argument or option is wrong or not supported; nothing was computed. Or, once
            all was computed: the scores could not be sampled from, being NaN for example.
    """
    requests.check_streamer(streamer)
    try:
        original = unwrap(model)
        requests.check_gamma(gamma)
        requests.check_seed(seed, generator)
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
        loop = partial(
            decode,
            gamma=gamma,
            kv=kv,
            cuda_graph=cuda_graph,
            seed=seed,
            generator=generator,
            streamer=streamer,
            forward=model,
        )
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
    cuda_graph: bool | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
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
        cuda_graph: as in :func:`speculative_generate`.
        seed: as in :func:`speculative_generate`.
        generator: as in :func:`speculative_generate`.
        streamer: gets the new tokens, ``[B]`` at a time; ``end`` is left to its owner.
        forward: called in place of ``model``: what ``torch.compile`` made of it.
        **model_kwargs: what else ``generate`` prepared.

    Returns:
        As :func:`speculative_generate`.
    """
    requests.check_gamma(gamma)
    requests.check_seed(seed, generator)
    requests.check_model(model)
    requests.check_options(lambda name: getattr(generation_config, name, None))
    requests.check_inputs(model_kwargs)
    requests.check_prompts(model, input_ids, model_kwargs.get("attention_mask"))
    batch, width = input_ids.shape
    requests.check_processors(logits_processor, batch)
    requests.check_row_seeds(seed, batch)
    scores = ProcessedScores(logits_processor, model.device)
    in_graph = requests.check_cuda_graph(cuda_graph, model, scores.waits)
    stopping = Stopping(stopping_criteria)
    pad_token = _pad_token(generation_config, stopping, batch)
    tokens = input_ids.to(model.device)
    pads = requests.count_pads(tokens, model_kwargs)
    columns = stopping.max_length + gamma + 1
    requests.check_context(model.config, stopping.max_length - int(pads.min()))
    requests.check_rotary(model.config, width - 1 - int(pads.max()), columns - int(pads.min()))
    given = _given_cache(model, model_kwargs, kv, batch, columns)
    policy = KVPolicy.parse(kv or DEFAULT_POLICY) if given is None else given.policy
    if given is not None:
        columns = given.get_max_length()
    elif in_graph:
        columns = round_up_columns(columns)

    selection: Selection = GreedySelection(scores)
    if generation_config.do_sample:
        table = random_table(row_streams(seed, generator, batch), columns, pads)
        selection = SampledSelection(scores, table)
    forward = model if forward is None else forward
    if model.device.type == "cuda":
        place_side_by_side_(model)
    weights = addresses(model) if in_graph else 0
    # Few numbers of end tokens, so that calls share graphs.
    ends = -(-len(stopping.eos) // 4) * 4
    shape = Shape(batch, columns, gamma, ends, policy, id(forward), weights, selection.key)
    keep = in_graph and given is None
    transcript = Transcript(tokens.cpu(), pads[:, 0].cpu(), stopping.max_length, pad_token)
    stream = ColumnStream(streamer, width)
    with (
        nested_attention_implementation(model),
        captured_decoding(model, shape, given, selection, keep) as captured,
    ):
        # A kept one has graphs that use its own selection.
        state, used = captured.state, captured.selection
        nested = NestedForward(model, forward, state.cache, state.pads)
        run: Callable[[int], None]
        if in_graph:
            capture_rounds(captured, model, forward, (width, stopping.max_length))
            run = captured.graphs.replay
            watch = Stopwatch(model.device)
        else:
            watch = Stopwatch(model.device)
            run = Round(nested, state, gamma, used, watch)
        state.begin(tokens, pads, stopping.max_length, pad_token, stopping.eos)
        used.begin(selection)
        with watch("prefill"):
            prefill(nested, tokens[:, :-1], generation_config.prefill_chunk_size or width)
        ahead = 1 if in_graph and not stopping.others else 0
        verifications = complete(run, state, transcript, stopping, stream, ahead)
        if isinstance(used, SampledSelection):
            used.check(transcript.last)
        metrics = _metrics(state, transcript, watch, verifications, width, in_graph)
        cache = captured.lend_cache() if keep else state.cache

    sequences = transcript.sequences().to(input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {_CACHE_FIELD: cache, "sequences": sequences, "metrics": metrics}
    return SpeculativeOutput(**fields)


def _metrics(
    state: DecodingState,
    transcript: Transcript,
    watch: Stopwatch,
    verifications: int,
    width: int,
    in_graph: bool,
) -> DecodingMetrics:
    seconds: dict[str, Any] = watch.seconds()
    if in_graph:
        seconds |= {"draft_seconds": None, "verification_seconds": None}
    return DecodingMetrics(
        gamma=len(state.accepted_per_position),
        batch=len(state.ids),
        rounds=int(state.rounds),
        verifications=verifications,
        accepted_per_position=state.accepted_per_position.tolist(),
        tokens=int((transcript.last + 1 - width).sum()),
        in_graph=in_graph,
        **seconds,
    )


def _given_cache(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    kv: str | KVPolicy | None,
    batch: int,
    columns: int,
) -> NestedKVCache | None:
    """The user's cache, not the one that transformers makes where there is none."""
    policy = None if kv is None else KVPolicy.parse(kv)
    for given in (model_kwargs.get(name) for name in requests.CACHES):
        if getattr(given, "_is_user_defined", False):
            return requests.check_cache(given, policy, batch, columns, model.device)
    return None


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
