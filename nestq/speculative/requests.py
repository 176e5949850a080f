"""What a call asks for, checked before any work is done."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
)

from nestq import ops
from nestq.argument_checks import check_int, first_in_training
from nestq.kv_cache import NestedKVCache
from nestq.kv_policy import KVPolicy
from nestq.tensor import NestedQuantTensor

MAX_GAMMA = 16
MAX_SEED = 2**64 - 1
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# What transformers calls the cache: the newer and the older name.
CACHES = ("cache", "past_key_values")

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
    "prompt_lookup_num_tokens": ((None,), "prompt lookup; the model is its own draft"),
    "assistant_early_exit": ((None,), "an early-exit assistant; the model is its own draft"),
    "use_mtp": ((None, False), "multi-token prediction; the model is its own draft"),
    "output_scores": ((None, False), "scores, which are not kept"),
    "output_logits": ((None, False), "logits, which are not kept"),
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

# Keywords that transformers' generate takes or passes on, and speculative decoding does not.
_KEYWORDS = {
    "assistant_model": "the model is its own draft",
    "custom_generate": "it is how nestq enters transformers' generate",
    "inputs_embeds": "prompts are token ids",
    "negative_prompt_ids": "classifier-free guidance is not supported",
    "negative_prompt_attention_mask": "classifier-free guidance is not supported",
    "synced_gpus": "models spread over processes are not supported",
}


def check_gamma(gamma: int) -> None:
    """Refuse what is no number of draft tokens."""
    check_int("gamma", gamma, 0, MAX_GAMMA)


def check_seed(seed: object, generator: object) -> None:
    """Refuse what is no seed or list of seeds, and no generator of one."""
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        if seed is not None:
            raise ValueError(f"generator must be left out where seed is given, got seed={seed!r}")
    if seed is not None:
        listed = seed if isinstance(seed, Sequence) and not isinstance(seed, str) else [seed]
        for number in listed:
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
    """Refuse a model that is not a nested causal language model in evaluation mode."""
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
    weights = {n: w for n, w in model.named_parameters() if isinstance(w, NestedQuantTensor)}
    if not weights:
        raise ValueError(
            f"model must have nested weights, and {_name(model)} has none: call "
            "nestq.quantize_(model, ...) first, or load a nestq checkpoint"
        )
    base_only = [name for name, weight in weights.items() if weight.refinement is None]
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


def check_options(option: Callable[[str], Any]) -> None:
    """Refuse generation options by name; ``option`` gives the value of one, or None."""
    for name, (off, meaning) in _OPTIONS.items():
        value = option(name)
        if value not in off:
            raise ValueError(f"{name}={value!r} is not supported: it asks for {meaning}")
    count = option("num_return_sequences")
    if count is not None:
        check_int("num_return_sequences", count, 1)
        if count > 1 and not option("do_sample"):
            raise ValueError(
                f"num_return_sequences={count} is not supported without do_sample=True: it asks "
                "for several sequences, and greedy decoding has one"
            )
    chunk = option("prefill_chunk_size")
    if chunk is not None:
        check_int("prefill_chunk_size", chunk, 1)


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


def check_inputs(model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs of the model other than token ids, their mask and positions."""
    known = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHES)
    unknown = [k for k, value in model_kwargs.items() if k not in known and value is not None]
    if unknown:
        raise ValueError(f"{unknown[0]} is not supported: the model is given token ids only")


def check_cuda_graph(cuda_graph: bool | None, model: PreTrainedModel, waits: bool) -> bool:
    """Whether rounds are to be CUDA graphs; refused where they were asked for and cannot be.

    Args:
        cuda_graph: what was asked for.
        model: that decodes.
        waits: whether logits processors make the host wait for the device.
    """
    if cuda_graph not in (None, True, False):
        raise ValueError(f"cuda_graph must be True, False or None, got {cuda_graph!r}")
    devices = {str(parameter.device) for parameter in model.parameters()}
    obstacles = {
        f"the model is on {', '.join(sorted(devices))}": model.device.type != "cuda"
        or len(devices) > 1,
        "logits processors run on the host": waits,
        "the reference implementation is selected": ops.selected_implementation() == "reference",
    }
    obstacle = next((text for text, there in obstacles.items() if there), None)
    if cuda_graph and obstacle:
        raise ValueError(f"cuda_graph=True is not possible here: {obstacle}")
    return obstacle is None and cuda_graph is not False


def check_prompts(model: PreTrainedModel, ids: Any, mask: Any) -> None:
    """Refuse what are no token ids of the model ``[B, n]``, or no mask of theirs (or None)."""
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS or ids.dim() != 2:
        got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise ValueError(f"input_ids must be an integer tensor [batch, tokens], got {got}")
    if 0 in ids.shape:
        raise ValueError(
            f"input_ids must hold at least one token a row, got shape {tuple(ids.shape)}"
        )
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        got = str(tuple(mask.shape)) if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {got}"
        )
    embedding: Any = model.get_input_embeddings()
    vocabulary = len(embedding.weight)
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"input_ids must be from 0 to {vocabulary - 1} for {_name(model)}, got {low} to {high}"
        )


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


def count_pads(tokens: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """Left padding of each prompt, int64 ``[B, 1]``.

    Args:
        tokens: int64 ``[B, n]``, which :func:`check_prompts` let pass.
        model_kwargs: what ``generate`` prepared for the forward pass.

    Raises:
        ValueError: a prompt is padded elsewhere, or positions do not follow from the mask.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(tokens) if mask is None else mask.to(tokens.device)
    mask = mask.bool()
    if (mask[:, :-1] & ~mask[:, 1:]).any() or not mask[:, -1].all():
        raise ValueError(
            "attention_mask must be 0 on left padding and 1 elsewhere, with at least one token a "
            "row: tokenize with padding_side='left'"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = mask.cumsum(1) - 1
        if ((positions.to(tokens.device) != expected) & mask).any():
            raise ValueError("position_ids must count the tokens after the padding from 0 on")
    return (~mask).sum(1, keepdim=True)


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


def check_cache(
    cache: Any, policy: KVPolicy | None, batch: int, columns: int, device: torch.device
) -> NestedKVCache:
    """The user's cache; refused if it is of another kind, in use, or too small."""
    if not isinstance(cache, NestedKVCache):
        raise ValueError(f"cache must be a NestedKVCache, got {type(cache).__name__}")
    size = len(cache.lengths), cache.get_max_length()
    if size[0] != batch or size[1] < columns:
        raise ValueError(
            f"cache must have batch_size={batch} and max_length of at least {columns} (the maximum "
            f"length of a sequence and the tokens of a round), got batch_size={size[0]} and "
            f"max_length={size[1]}"
        )
    if cache.lengths.device != device:
        raise ValueError(f"cache must be on the model's {device}, got {cache.lengths.device}")
    if cache.lengths.any() or cache.get_seq_length():
        raise ValueError("cache must be empty: call cache.reset(), and pass the whole prompt")
    if policy not in (None, cache.policy):
        raise ValueError(
            f"kv must be left out or be that of the cache, {cache.policy}, got {policy}"
        )
    return cache


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
