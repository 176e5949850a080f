"""What a call asks for, checked before any work is done."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from transformers import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
)

from nestq import ops
from nestq.argument_checks import check_int, first_in_training
from nestq.drafts import drafts_differently, is_base_alone
from nestq.kv_policy import KVPolicy

MAX_GAMMA = 16
MAX_SEED = 2**64 - 1

# Generation options that speculative decoding cannot honour: values that leave them off, and what
# they ask for.
_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search"),
    "num_beam_groups": ((None, 1), "group beam search"),
    "constraints": ((None,), "constrained beam search"),
    "force_words_ids": ((None,), "constrained beam search"),
    "penalty_alpha": ((None, 0), "contrastive search"),
    "dola_layers": ((None,), "DoLa decoding"),
    "guidance_scale": ((None, 1), "classifier-free guidance"),
    "prompt_lookup_num_tokens": ((None,), "transformers' prompt lookup; pass prompt_lookup=..."),
    "assistant_early_exit": ((None,), "an early-exit assistant; the model is its own draft"),
    "use_mtp": ((None, False), "multi-token prediction; the model is its own draft"),
    "output_attentions": ((None, False), "attention weights, which are not computed"),
    "output_hidden_states": ((None, False), "hidden states, which are not kept"),
    "token_healing": ((None, False), "token healing"),
    "use_cache": ((None, True), "decoding without a cache"),
    # Hub configs of models with sliding windows may say "hybrid", which transformers ignores.
    "cache_implementation": (
        (None, "dynamic", "hybrid"),
        "another cache; pass cache=NestedKVCache(...) or kv=...",
    ),
}

# Lengths, and the least that each can be.
_LENGTHS = {
    "max_new_tokens": 1,
    "max_length": 1,
    "min_new_tokens": 0,
    "min_length": 0,
    "prefill_chunk_size": 1,
    "num_return_sequences": 1,
}

# Keywords that transformers' generate takes or passes on, and speculative decoding does not.
_KEYWORDS = {
    "assistant_model": "the model is its own draft",
    "custom_generate": "it is how nestq enters transformers' generate",
    "negative_prompt_ids": "classifier-free guidance is not supported",
    "negative_prompt_attention_mask": "classifier-free guidance is not supported",
    "synced_gpus": "models spread over processes are not supported",
}


def check_gamma(gamma: object) -> None:
    """Refuse what is no number of draft tokens, nor ``"auto"``."""
    if not isinstance(gamma, str):
        check_int("gamma", gamma, 0, MAX_GAMMA)
    elif gamma != "auto":
        raise ValueError(f"gamma must be an int from 0 to {MAX_GAMMA}, or 'auto', got {gamma!r}")


def check_drafting(draft_stop: object, prompt_lookup: object) -> None:
    """Refuse what is no probability (or None), and no number of tokens to look up."""
    is_number = isinstance(draft_stop, int | float) and not isinstance(draft_stop, bool)
    # Not NaN either, with which no comparison is true.
    if draft_stop is not None and not (is_number and 0 <= draft_stop <= 1):  # type: ignore[operator]
        raise ValueError(
            f"draft_stop must be a probability from 0 to 1, or None, got {draft_stop!r}"
        )
    check_int("prompt_lookup", prompt_lookup, 0, MAX_GAMMA)


def check_draft_stop(
    draft_stop: float | None, gamma: object, prompt_lookup: int, do_sample: bool
) -> None:
    """Refuse to stop drafts early where that would bias samples.

    How long a round takes then depends on random numbers of tokens that are not kept, which later
    rounds use again; so may no choice depend on how long rounds take.
    """
    if draft_stop is not None and do_sample and (gamma == "auto" or prompt_lookup):
        other = "gamma='auto'" if gamma == "auto" else f"prompt_lookup={prompt_lookup}"
        raise ValueError(
            f"draft_stop={draft_stop} with {other} is not supported in sampling: rounds would be "
            "chosen by times that depend on the samples; give gamma as a number and no "
            "prompt_lookup, or leave draft_stop out, or do_sample=False"
        )


def check_seed(seed: object, generator: object) -> None:
    """Refuse what is no seed or list of seeds, and no generator of one."""
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        if seed is not None:
            raise ValueError(f"generator must be left out where seed is given, got seed={seed!r}")
    if seed is not None:
        is_list = isinstance(seed, Sequence) and not isinstance(seed, str | bytes)
        for number in seed if is_list else [seed]:  # type: ignore[attr-defined]
            check_int("seed", number, 0, MAX_SEED)


def check_row_seeds(seed: int | Sequence[int] | None, batch: int) -> None:
    """Refuse a list of seeds that has not one for each row."""
    if isinstance(seed, Sequence) and len(seed) != batch:
        raise ValueError(f"seed must be one int, or one for each of {batch} rows, got {len(seed)}")


def check_streamer(streamer: object) -> None:
    """Refuse what tokens cannot be given to."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(f"streamer must have put and end, got {type(streamer).__name__}")


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that is no causal language model in evaluation mode, or lacks a plane."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ValueError(
            "model must be a transformers causal language model (or torch.compile of one), "
            f"got {type(model).__name__}"
        )
    if model.config.is_encoder_decoder or model._is_stateful:
        kind = "encoder-decoder" if model.config.is_encoder_decoder else "recurrent"
        raise ValueError(f"model must be a decoder-only transformer, got the {kind} {_name(model)}")
    if not model._supports_attention_backend:
        raise ValueError(
            "model must call attention through transformers' AttentionInterface, and "
            f"{_name(model)} does not"
        )
    base_only = [name for name, weight in model.named_parameters() if is_base_alone(weight)]
    if base_only:
        raise ValueError(
            f"model must hold both planes, and {base_only[0]} has the base plane alone: load the "
            "checkpoint with planes='both'"
        )
    training = first_in_training(model)
    if training is not None:
        raise ValueError(
            f"model must be in evaluation mode, and {training} is in training mode: call "
            "model.eval() first"
        )
    softcap = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if softcap is not None:
        raise ValueError(
            "model must have no soft cap on attention, and the config of "
            f"{_name(model)} has attn_logit_softcapping={softcap}"
        )
    _check_devices(model)


def check_draft(model: PreTrainedModel, policy: KVPolicy, gamma: int | Literal["auto"]) -> None:
    """Refuse to draft with what is the target in all respects, which could only cost time.

    Args:
        model: that :func:`check_model` let pass.
        policy: of the call's cache.
        gamma: of the call.
    """
    if gamma == 0 or not policy.drafts_as_target or drafts_differently(model):
        return
    raise ValueError(
        f"gamma must be 0 for {_name(model)} with kv={str(policy)!r}, got {gamma!r}: its draft "
        "would be the target itself. Quantize the model (nestq.quantize_) or load a nestq "
        "checkpoint, let its draft skip layers (nestq.draft_and_verify), or let drafts read less "
        "of the cache, for example kv='kv4/kv8' or kv='16/16+streaming(4,1020)'"
    )


def _check_devices(model: PreTrainedModel) -> None:
    """Refuse a model without numbers, or with parts on other devices."""
    names: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        names.setdefault(tensor.device, name)
    if len(names) > 1:
        parts = ", ".join(f"{name} on {device}" for device, name in names.items())
        raise ValueError(f"model must be on one device, got {parts}")
    if model.device.type == "meta":
        raise ValueError(
            f"model must hold numbers, and {_name(model)} is on the meta device: load the weights"
        )


def check_options(option: Callable[[str], Any]) -> None:
    """Refuse generation options by name; ``option`` gives the value of one, or None."""
    for name, (off, meaning) in _OPTIONS.items():
        value = option(name)
        if value not in off:
            raise ValueError(f"{name}={value!r} is not supported: it asks for {meaning}")
    for name, least in _LENGTHS.items():
        value = option(name)
        if value is not None:
            check_int(name, value, least)
    count = option("num_return_sequences")
    if count is not None and count > 1 and not option("do_sample"):
        raise ValueError(
            f"num_return_sequences={count} is not supported without do_sample=True: it asks for "
            "several sequences, and greedy decoding has one"
        )
    seconds = option("max_time")
    # Not NaN either, with which no comparison is true.
    if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
        raise ValueError(f"max_time must be a number of seconds >= 0, got {seconds!r}")


def check_keywords(keywords: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` by name."""
    for name, reason in _KEYWORDS.items():
        value = keywords.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported: {reason}")
    for name in ("logits_processor", "stopping_criteria"):
        value = keywords.get(name)
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {type(value).__name__}")


def check_cuda_graph(
    cuda_graph: bool | None,
    model: PreTrainedModel,
    waits: bool,
    draft_stop: float | None = None,
    keeps_scores: bool = False,
) -> bool:
    """Whether rounds are to be CUDA graphs; refused where they were asked for and cannot be.

    Args:
        cuda_graph: what was asked for.
        model: that decodes.
        waits: whether logits processors make the host wait for the device.
        draft_stop: of the call.
        keeps_scores: whether scores or logits are to be returned.
    """
    if not (cuda_graph is None or isinstance(cuda_graph, bool)):
        raise ValueError(f"cuda_graph must be True, False or None, got {cuda_graph!r}")
    obstacles = {
        f"the model is on {model.device}": model.device.type != "cuda",
        "logits processors run on the host": waits,
        f"draft_stop={draft_stop} lets rounds end early": draft_stop is not None,
        "output_scores and output_logits are kept round by round": keeps_scores,
        "the reference implementation is selected": ops.selected_implementation() == "reference",
    }
    obstacle = next((text for text, there in obstacles.items() if there), None)
    if cuda_graph and obstacle:
        raise ValueError(f"cuda_graph=True is not possible here: {obstacle}")
    return obstacle is None and cuda_graph is not False


def check_processors(processors: LogitsProcessorList, batch: int) -> None:
    """Refuse logits processors that are no function of the ids, or that need rows in step."""
    for processor in processors:
        if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
            raise ValueError(
                "watermarking_config with SynthID is not supported: its processor changes when it "
                "is called, and draft and target must see the same one"
            )
        if batch > 1 and isinstance(processor, PrefixConstrainedLogitsProcessor):
            raise ValueError(
                f"prefix_allowed_tokens_fn needs batch size 1, got {batch}: rows differ in length, "
                "and it would be asked about rows beyond their end"
            )


def check_context(config: PreTrainedConfig, longest: int) -> None:
    """Refuse rows that may grow beyond the positions that the model was made for.

    Args:
        config: of the model.
        longest: tokens that a row may have, draft tokens not included: they are never kept there.
    """
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ValueError(
            f"max_length is too large: prompt and new tokens may be {longest} together, and the "
            f"model's context (max_position_embeddings) is {limit}; lower max_new_tokens"
        )


def check_rotary(config: PreTrainedConfig, shortest: int, longest: int) -> None:
    """Refuse lengths at which rotary embeddings change.

    With such scaling the angles of every token change when the largest position of a forward pass
    crosses a limit: the output would depend on where rounds begin and end.

    Args:
        config: of the model.
        shortest: tokens of the shortest prefill.
        longest: tokens that a row may have, draft tokens included.
    """
    config = config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for kind in [p for p in parameters.values() if isinstance(p, dict)] or [parameters]:
        name = kind.get("rope_type") or "default"
        limit = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        crossed = longest > limit and ("dynamic" in name or shortest <= limit)
        if crossed and ("dynamic" in name or name == "longrope"):
            raise ValueError(
                f"max_length is too large: the model's rotary embeddings (rope_type={name!r}) "
                f"change at {limit} tokens, and rows may grow to {longest}, draft tokens included"
            )


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
