"""A cache that the user gives: empty, or with the beginning of the prompts."""

from dataclasses import replace
from typing import Any, get_args

from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_caches import CONTINUED, KVCache, check_draft_room
from nestq.kv_policy import KVPolicy, default_policy
from nestq.speculative.prompts import CACHES, Prompt


def policy_of(
    model: PreTrainedModel, model_kwargs: dict[str, Any], kv: str | KVPolicy | None
) -> KVPolicy:
    """The policy of a call: that which is asked for, or of the user's cache, or the model's.

    Args:
        model: that decodes.
        model_kwargs: arguments of ``generate``, or what it prepared; the cache among them.
        kv: what the user asks for.
    """
    if kv is not None:
        return KVPolicy.parse(kv)
    caches = (model_kwargs.get(name) for name in CACHES)
    given = next((cache for cache in caches if isinstance(cache, KVCache)), None)
    return default_policy(model) if given is None else given.policy


def given_cache(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    kv: str | KVPolicy | None,
    prompt: Prompt,
    columns: int,
) -> tuple[KVCache | None, Prompt]:
    """The user's cache, or None, and the prompt with what the cache has of it.

    A cache of an earlier call gets more room if it needs it.

    Args:
        model: that decodes.
        model_kwargs: what ``generate`` prepared; it makes a cache where the user gives none.
        kv: what the user asks for.
        prompt: of the call.
        columns: positions that are needed.

    Raises:
        ValueError: the cache is of another kind, does not fit, or has more than the prompt.
    """
    given = next(
        (
            cache
            for cache in (model_kwargs.get(name) for name in CACHES)
            if getattr(cache, "_is_user_defined", False)
        ),
        None,
    )
    if given is None:
        return None, prompt
    cache = _checked(given, kv, prompt.pads)
    if not cache.lengths.any():
        if cache.get_max_length() < columns:
            raise ValueError(
                f"cache must have max_length of at least {columns} (the maximum length of a "
                f"sequence and the tokens of a round), got max_length={cache.get_max_length()}"
            )
        check_draft_room(cache, columns - prompt.tokens.shape[1] + 1)
        return cache, prompt
    prompt = _continued(prompt, cache)
    if isinstance(cache, CONTINUED) and cache.get_max_length() < columns:
        cache.grow(columns)
    return cache, prompt


def _checked(cache: Any, kv: str | KVPolicy | None, pads: Tensor) -> KVCache:
    if not isinstance(cache, KVCache):
        names = " or ".join(kind.__name__ for kind in get_args(KVCache))
        raise ValueError(f"cache must be a {names}, got {type(cache).__name__}")
    if len(cache.lengths) != len(pads):
        raise ValueError(
            f"cache must have batch_size={len(pads)}, got batch_size={len(cache.lengths)}"
        )
    if cache.lengths.device != pads.device:
        raise ValueError(f"cache must be on the model's {pads.device}, got {cache.lengths.device}")
    if kv is not None and KVPolicy.parse(kv) != cache.policy:
        raise ValueError(
            f"kv must be left out or be that of the cache, {str(cache.policy)!r}, "
            f"got {str(KVPolicy.parse(kv))!r}"
        )
    if cache.get_seq_length():
        raise ValueError(
            "cache must be empty or of an earlier call, got one that a forward pass of the model "
            "filled: call cache.reset(), and pass the whole prompt"
        )
    return cache


def _continued(prompt: Prompt, cache: KVCache) -> Prompt:
    """The prompt, of which a cache in use has the beginning."""
    if not isinstance(cache, CONTINUED):
        names = " or a ".join(kind.__name__ for kind in get_args(CONTINUED))
        raise ValueError(
            f"cache must be empty, got a {type(cache).__name__} in use, and only a {names} can be "
            "continued: call cache.reset(), and pass the whole prompt"
        )
    if prompt.inputs:
        raise ValueError(
            "cache must be empty where inputs_embeds or images are given: call cache.reset()"
        )
    tokens = prompt.tokens.shape[1] - prompt.pads[:, 0]
    too_long = (cache.lengths >= tokens).nonzero().flatten().tolist()
    if too_long:
        row = too_long[0]
        raise ValueError(
            f"cache must hold less than the prompt, got {int(cache.lengths[row])} positions for "
            f"the {int(tokens[row])} tokens of row {row}: pass the whole conversation, of which "
            "the cache has the beginning, or call cache.reset()"
        )
    return replace(prompt, cached=cache.lengths.clone())
