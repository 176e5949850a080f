"""Self-speculative decoding through transformers' ``generate``."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from nestq.architectures import unwrap
from nestq.attention import nested_attention_implementation
from nestq.kv_caches import draft_room, reading_prompt
from nestq.kv_policy import KVPolicy
from nestq.speculative import requests
from nestq.speculative.adaptive import Chooser
from nestq.speculative.adaptive_rounds import AdaptiveRounds
from nestq.speculative.given_cache import given_cache, policy_of
from nestq.speculative.graph_key import model_key, settings_key
from nestq.speculative.graphs import (
    Shape,
    capture_rounds,
    captured_decoding,
    round_up_columns,
    settle,
    with_room,
)
from nestq.speculative.kept_scores import KeptScores
from nestq.speculative.key_warning import warn_of_uneven_keys
from nestq.speculative.loop import ColumnStream, Transcript, complete, take
from nestq.speculative.metrics import Clock, DecodingMetrics, Stopwatch
from nestq.speculative.options import option_value, pad_token, stop_strings_as_criteria
from nestq.speculative.prefill import prompt_columns, prompt_forward
from nestq.speculative.prompts import (
    CACHES,
    check_embeddings,
    check_prompts,
    prefill,
    prefill_and_choose,
    read_prompt,
)
from nestq.speculative.round import NestedForward
from nestq.speculative.round_kinds import RoundKind, kinds_of, round_of
from nestq.speculative.sampling import SampledSelection, random_table, row_streams
from nestq.speculative.scores import ProcessedScores
from nestq.speculative.selection import GreedySelection, Selection
from nestq.speculative.state import DecodingState
from nestq.speculative.stopping import Stopping

_CACHE_FIELD = next(
    field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput) if field.name in CACHES
)


@dataclasses.dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What is returned with ``return_dict_in_generate=True``.

    Attributes:
        sequences: int64 ``[B, columns]``, prompts and new tokens.
        cache: the KV cache of the call (``past_key_values`` in older versions of transformers).
        scores: with ``output_scores``, of each new token float32 ``[B, V]``, the target's logits
            after logits processors. Where a row ended before others, as in transformers, what
            follows its padding.
        logits: with ``output_logits``, the same without processors.
        metrics: acceptance and times of the call.
    """

    metrics: DecodingMetrics | None = None


def speculative_generate(
    model: Any,
    inputs: Tensor | None = None,
    *,
    gamma: int | Literal["auto"] = 4,
    draft_stop: float | None = None,
    prompt_lookup: int = 0,
    kv: str | KVPolicy | None = None,
    cuda_graph: bool | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generate_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Generate text, drafting with less of the model than verifies: with base planes, for example.

    Greedy tokens are those that the target view generates alone (``gamma=0``, autoregressive
    decoding in the same engine); sampled tokens (``do_sample=True``) have the distribution that the
    target's have. Prompts, lengths, processors, stopping criteria and the form of the output are
    transformers' own: this is ``model.generate`` with another decoding loop.

    Samples are reproducible: the same inputs, gamma and seed give the same tokens. A row's tokens
    do not depend on the other rows or on padding: with a list of seeds, a row is what its prompt
    gives alone with the row's seed. Both hold as far as the logits are the same bits, as they are
    on a CPU. Another gamma gives other tokens, of the same distribution; and so ``gamma="auto"``
    and ``prompt_lookup``, which choose by measured times and for all rows together, give other
    samples each time. Greedy tokens are always the same.

    A ``cache`` of an earlier call (``output.cache``) continues it: give the whole conversation, and
    only what the cache does not have is read. It must have the first tokens of each row, which is
    not checked, and fewer than there are; it grows if it must. Lowering ``cache.lengths`` rolls it
    back, and a call that an exception ended leaves it so that it can be continued.

    Threads may decode with one model at the same time. Until they end, its other forward passes
    raise TypeError: decoding sets the attention implementation in the model's config.

    Args:
        model: a transformers causal language model, or ``torch.compile`` of one: the compiled
            module then computes. Its draft must be less than its target, or gamma 0: it has
            quantized weights, or skips layers in drafts, or ``kv`` says that drafts read less.
        inputs: int64 ``[B, n]`` token ids, left-padded; ``input_ids=`` is the same.
        gamma: draft tokens a round, 0 to 16; or ``"auto"`` to choose 0, 1, 2, 4, 6 or 8 before each
            round, for the most tokens a second by the acceptance and the times of rounds so far.
            Where no draft pays it goes on without, warns of it once, and tries again every 32
            tokens. With CUDA graphs, the first call of a batch size and length then captures one
            for each, which takes several times as long.
        draft_stop: probability, 0 to 1; drafts of a row end behind a token that the draft gave a
            lower one. Rounds then run eagerly, and the host waits for each draft step, so that on a
            GPU this costs more than it saves. In sampling only with a number for gamma and without
            ``prompt_lookup``.
        prompt_lookup: tokens, 0 to 16, that may be verified in place of the draft's: those that
            followed the last 2 or 3 tokens of the row where these occurred before. Whether they are
            or the draft's is chosen for each round, as with ``gamma="auto"``. 0 for never.
        kv: what is cached and what drafts read of it, for example ``"kv4/kv8"`` or
            ``"16/16+streaming(4,1020)"``: see :meth:`KVPolicy.parse`. Default the policy of a
            ``cache`` that is given, or that of the checkpoint, or ``"kv8/kv8"`` for a model with
            quantized weights and ``"16/16"`` for a dense one.
        cuda_graph: whether each round is one replay of a CUDA graph, which runs no Python of the
            model (hooks, for example); None for yes wherever it is possible: on one GPU, without
            ``draft_stop`` and without logits processors other than temperature, top-k, top-p,
            min-p, typical and epsilon warpers and the repetition penalty; where scores or logits
            are kept, rounds run eagerly, too. The first call of a batch size and length captures
            it, and later calls take it over, with its KV cache: see :func:`release_graphs`. Rounds
            over a given ``cache`` are captured at every call.
        seed: of the samples: an int from 0 to 2**64 - 1, from which every row gets random numbers
            of its own; or a list of ints, one for each row (each returned sequence), a prompt alone
            having the same with ``seed=s`` and ``seed=[s]``; or None to draw one from PyTorch's
            default generator, so that ``torch.manual_seed`` reproduces a run.
        generator: to draw the seed from, in place of PyTorch's default one.
        streamer: gets the prompt and, as soon as they are accepted, the tokens; its ``end`` is
            called when the call ends, with an error too.
        tokenizer: needed for ``stop_strings``.
        **generate_kwargs: of ``model.generate``: ``attention_mask``, ``max_new_tokens``,
            ``eos_token_id``, ``stop_strings``, ``repetition_penalty``, ``do_sample``,
            ``temperature``, ``num_return_sequences``, ``return_dict_in_generate``,
            ``output_scores``, ``output_logits``, ``cache`` and so on; ``inputs_embeds`` in place
            of token ids; ``pixel_values`` besides them, for a model like Llava. A model's
            generation config may sample by default; ``do_sample=False`` decodes greedily.

    Returns:
        int64 ``[B, columns]``, prompts and new tokens, shorter rows filled with the pad token; a
        :class:`SpeculativeOutput` with ``return_dict_in_generate=True``. Of a prompt of embeddings
        alone the new tokens only, as from ``model.generate``.

    Raises:
        ValueError: an argument or option is wrong or not supported; nothing was computed. Or, in
            the middle: no token could be chosen, the scores being NaN for example.
    """
    requests.check_streamer(streamer)
    try:
        original = unwrap(model)
        requests.check_gamma(gamma)
        requests.check_drafting(draft_stop, prompt_lookup)
        requests.check_seed(seed, generator)
        requests.check_model(original)
        requests.check_keywords(generate_kwargs)
        option = partial(option_value, generate_kwargs, original.generation_config)
        requests.check_options(option)
        requests.check_draft(original, policy_of(original, generate_kwargs, kv), gamma)
        prompts = generate_kwargs.get("input_ids") if inputs is None else inputs
        if prompts is not None:
            check_prompts(original, prompts, generate_kwargs.get("attention_mask"))
        embeddings = generate_kwargs.get("inputs_embeds")
        if embeddings is not None:
            check_embeddings(original, embeddings)
        if option("stop_strings") is not None:
            generate_kwargs |= stop_strings_as_criteria(option, tokenizer)
        loop = partial(
            decode,
            gamma=gamma,
            draft_stop=draft_stop,
            prompt_lookup=prompt_lookup,
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
    gamma: int | Literal["auto"] = 4,
    draft_stop: float | None = None,
    prompt_lookup: int = 0,
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
        input_ids: int64 ``[B, n]``; ``[B, 0]`` for embeddings alone.
        logits_processor: applied at every position, for draft and target alike.
        stopping_criteria: applied to every accepted token.
        generation_config: of the call.
        gamma: draft tokens a round, 0 to 16, or ``"auto"``.
        draft_stop: as in :func:`speculative_generate`.
        prompt_lookup: as in :func:`speculative_generate`.
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
    requests.check_drafting(draft_stop, prompt_lookup)
    do_sample = bool(generation_config.do_sample)
    requests.check_draft_stop(draft_stop, gamma, prompt_lookup, do_sample)
    requests.check_seed(seed, generator)
    requests.check_model(model)
    requests.check_options(lambda name: getattr(generation_config, name, None))
    policy = policy_of(model, model_kwargs, kv)
    requests.check_draft(model, policy, gamma)
    chunk = generation_config.prefill_chunk_size
    prompt = read_prompt(model, input_ids, model_kwargs, chunk)
    tokens, pads = prompt.tokens, prompt.pads
    batch, width = tokens.shape
    requests.check_processors(logits_processor, batch)
    requests.check_row_seeds(seed, batch)
    with torch.inference_mode(False):  # a later call may write its tensors outside that mode
        scores = ProcessedScores(logits_processor, model.device, prompt.hidden)
    as_dict = generation_config.return_dict_in_generate
    kept = KeptScores(
        width,
        scores if as_dict and generation_config.output_scores else None,
        logits=bool(as_dict and generation_config.output_logits),
    )
    in_graph = requests.check_cuda_graph(cuda_graph, model, scores.waits, draft_stop, kept.any)
    stopping = Stopping(stopping_criteria, prompt.hidden)
    pad = pad_token(generation_config, stopping, batch)
    kinds = kinds_of(gamma, prompt_lookup)
    columns = stopping.max_length + max(kind.tokens for kind in kinds) + 1
    requests.check_context(model.config, stopping.max_length - int(pads.min()))
    requests.check_rotary(model.config, width - 1 - int(pads.max()), columns - int(pads.min()))
    given, prompt = given_cache(model, model_kwargs, kv, prompt, columns)
    room = draft_room(policy, columns - width + 1)
    if given is not None:
        columns = given.get_max_length()
    elif in_graph:
        columns = round_up_columns(columns)
        room = round_up_columns(room) if room else 0

    selection: Selection = GreedySelection(scores)
    if generation_config.do_sample:
        with torch.inference_mode(False):  # likewise
            table = random_table(row_streams(seed, generator, batch), columns, pads)
        selection = SampledSelection(scores, table)
    forward = model if forward is None else forward
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        settle(model)
    keys = (model_key(model), settings_key()) if in_graph else (None, None)
    # Few numbers of end tokens, so that calls share graphs.
    ends = -(-len(stopping.eos) // 4) * 4
    shape = Shape(batch, columns, kinds, ends, policy, *keys, selection.key, room)
    keep = in_graph and given is None
    transcript = Transcript(tokens.cpu(), pads[:, 0].cpu(), stopping.max_length, pad)
    stream = ColumnStream(streamer, width)
    with (
        # Streams, events and graphs are made on the current device.
        torch.cuda.device(model.device) if on_gpu else nullcontext(),
        nested_attention_implementation(model),
        captured_decoding(model, forward, shape, given, selection, keep) as captured,
    ):
        # A kept one has graphs that use its own selection.
        state, used = captured.state, captured.selection
        nested = NestedForward(model, forward, state.cache, state.pads)
        rounds: dict[RoundKind, Callable[[int], None]]
        if in_graph:
            lengths = transcript.longest(), stopping.max_length
            in_graph = capture_rounds(captured, model, forward, lengths, bool(cuda_graph))
        if in_graph:
            rounds = {kind: partial(captured.graphs.replay, kind) for kind in kinds}
            watch = Stopwatch(model.device)
        else:
            watch = Stopwatch(model.device)
            rest = nested, state, kept.over(used), watch, draft_stop
            rounds = {kind: round_of(kind, *rest) for kind in kinds}
        reads = prompt_forward(model, forward, captured, in_graph)
        reader = NestedForward(model, reads, state.cache, state.pads)
        adaptive = None
        if len(kinds) > 1:
            chooser = Chooser(kinds, captured.times)
            adaptive = AdaptiveRounds(rounds, chooser, transcript, Clock(model.device))

        def start() -> None:
            state.begin(tokens, pads, stopping.max_length, pad, stopping.eos)
            used.begin(selection)
            with reading_prompt(state.cache):
                if prompt.inputs:
                    prefill_and_choose(nested, prompt, state, kept.over(used))
                else:
                    prefill(reader, prompt, prompt_columns(model, prompt, chunk))

        with watch("prefill"):
            with_room(start)
        if prompt.inputs:
            take(state.report.cpu(), state, transcript, stopping, stream)
        ahead = 1 if in_graph and stopping.on_host else 0
        run = adaptive or rounds[kinds[0]]
        observe = adaptive.observe if adaptive else None
        work = run, state, transcript, stopping, stream
        verifications = complete(*work, ahead, observe, watch.on_host)
        lookups = adaptive.lookups if adaptive else 0
        metrics = _metrics(state, transcript, watch, gamma, verifications, lookups, width, in_graph)
        warn_of_uneven_keys(state.cache, metrics, transcript.longest())
        kept.finish(nested, transcript)
        cache = captured.lend_cache() if keep else state.cache

    sequences = transcript.sequences(prompt.hidden).to(input_ids.device)
    if not as_dict:
        return sequences
    fields: dict[str, Any] = {_CACHE_FIELD: cache, "sequences": sequences, "metrics": metrics}
    return SpeculativeOutput(**fields | kept.fields())


def _metrics(
    state: DecodingState,
    transcript: Transcript,
    watch: Stopwatch,
    gamma: int | Literal["auto"],
    verifications: int,
    lookups: int,
    width: int,
    in_graph: bool,
) -> DecodingMetrics:
    seconds: dict[str, Any] = watch.seconds()
    if in_graph:
        seconds |= {"draft_seconds": None, "verification_seconds": None}
    return DecodingMetrics(
        gamma=gamma,
        batch=len(state.ids),
        rounds=int(state.rounds),
        verifications=verifications,
        accepted_per_position=state.accepted_per_position.tolist(),
        tokens=int((transcript.last + 1 - width).sum()),
        in_graph=in_graph,
        drafted_per_position=state.drafted_per_position.tolist(),
        lookups=lookups,
        **seconds,
    )
