"""Prompts: what they may be, and how they get into the cache.

A prompt is token ids. Or embeddings, or token ids and images: then all of it goes through the model
at once, the last token too, and the first new token comes of that pass. A cache of an earlier call
has the first tokens of each row already.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nestq.speculative.round import NestedForward
from nestq.speculative.selection import Selection
from nestq.speculative.state import DecodingState

# What transformers calls the cache: the newer and the older name.
CACHES = ("cache", "past_key_values")
# Inputs that a model takes besides token ids, and turns into embeddings of some of them: images, or
# what newer versions of transformers make of them before decoding begins.
IMAGES = ("image_sizes", "pixel_values", "mm_encoder_outputs")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Prompt:
    """The prompts of a batch, on the model's device.

    Attributes:
        tokens: int64 ``[B, n]``, padding on the left; 0 where only embeddings are known.
        pads: int64 ``[B, 1]``, padding columns of each row.
        hidden: columns at the beginning that are no token ids: n for embeddings alone, else 0.
        inputs: what the model is given in place of token ids alone; empty if they are all.
        cached: int64 ``[B]``, positions that the cache has already; None for none.
    """

    tokens: Tensor
    pads: Tensor
    hidden: int
    inputs: dict[str, Any]
    cached: Tensor | None = None


def read_prompt(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any], chunk: int | None
) -> Prompt:
    """The prompt of a call.

    Args:
        model: that decodes.
        input_ids: int64 ``[B, n]``; ``[B, 0]`` for embeddings alone.
        model_kwargs: what ``generate`` prepared for the forward pass.
        chunk: columns of a forward pass; None for all.

    Raises:
        ValueError: the prompt is none.
    """
    check_inputs(model, model_kwargs)
    embeddings = model_kwargs.get("inputs_embeds")
    images = _images(model_kwargs)
    ids, hidden = input_ids, 0
    if embeddings is not None:
        check_embeddings(model, embeddings)
        if input_ids.shape[1] == 0:
            hidden = embeddings.shape[1]
            ids = torch.zeros(embeddings.shape[:2], dtype=torch.int64)
        if ids.shape != embeddings.shape[:2] or images:
            raise ValueError(
                "inputs_embeds must stand for the whole prompt: give no images, and no input_ids "
                f"or as many, got input_ids {tuple(input_ids.shape)} and inputs_embeds "
                f"{tuple(embeddings.shape)}"
            )
    if chunk is not None and (embeddings is not None or images):
        given = "images" if images else "inputs_embeds"
        raise ValueError(f"prefill_chunk_size={chunk} is not supported with {given}")
    check_prompts(model, ids, model_kwargs.get("attention_mask"))
    tokens = ids.to(model.device)
    pads = count_pads(tokens, model_kwargs)
    inputs: dict[str, Any] = {"input_ids": tokens, **images} if images else {}
    if embeddings is not None:
        inputs = {"inputs_embeds": embeddings.to(model.device, model.dtype)}
    return Prompt(tokens, pads, hidden, inputs)


def _images(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What there is of images; nothing if there is none."""
    given = {name: model_kwargs[name] for name in IMAGES if model_kwargs.get(name) is not None}
    # Sizes alone are no image, nor is a dict of no modality.
    return given if given.get("pixel_values") is not None or given.get(IMAGES[-1]) else {}


def check_inputs(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs of the model other than a prompt, its mask and positions."""
    images = [name for name in IMAGES if name in inspect.signature(model.forward).parameters]
    known = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_embeds")
    unknown = set(model_kwargs).difference(known, CACHES, images)
    for name in sorted(unknown):
        if model_kwargs[name] is not None:
            raise ValueError(
                f"{name} is not supported: {type(model).__name__} may be given "
                f"{', '.join(['input_ids or inputs_embeds', *images])} and attention_mask"
            )


def check_embeddings(model: PreTrainedModel, embeddings: Any) -> None:
    """Refuse what are no embeddings ``[B, n, hidden_size]`` for a model."""
    size = model.config.get_text_config(decoder=True).hidden_size
    is_tensor = isinstance(embeddings, Tensor) and embeddings.is_floating_point()
    if not is_tensor or embeddings.dim() != 3 or embeddings.shape[2] != size:
        got = repr(embeddings)
        if isinstance(embeddings, Tensor):
            got = f"{embeddings.dtype} of shape {tuple(embeddings.shape)}"
        raise ValueError(
            f"inputs_embeds must be a floating-point tensor [batch, tokens, {size}], got {got}"
        )
    if embeddings.is_meta:
        raise ValueError("inputs_embeds must hold numbers, got a tensor on the meta device")


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
    for name, tensor in (("input_ids", ids), ("attention_mask", mask)):
        if tensor is not None and tensor.is_meta:
            raise ValueError(f"{name} must hold numbers, got a tensor on the meta device")
    if mask is not None and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold 0 and 1 only")
    embedding: Any = model.get_input_embeddings()
    vocabulary = len(embedding.weight)
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"input_ids must be from 0 to {vocabulary - 1} for {type(model).__name__}, "
            f"got {low} to {high}"
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
        # Transformers drops a mask of ones, and makes positions of it before.
        if positions.dim() != 2 or positions.shape[1] != tokens.shape[1]:
            raise ValueError(
                "attention_mask and position_ids must have the shape of input_ids, "
                f"{tuple(tokens.shape)}, got {tuple(positions.shape)}"
            )
        expected = mask.cumsum(1) - 1
        if ((positions.to(tokens.device) != expected) & mask).any():
            raise ValueError("position_ids must count the tokens after the padding from 0 on")
    return (~mask).sum(1, keepdim=True)


def prefill(model: NestedForward, prompt: Prompt, chunk: int | None) -> None:
    """Write all tokens of a prompt but the last.

    Args:
        model: forward passes over the cache.
        prompt: of token ids.
        chunk: columns a forward pass; None for all.
    """
    tokens, pads = prompt.tokens[:, :-1], model.pads
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    start = 0
    if prompt.cached is not None:
        start = int((prompt.cached[:, None] + pads).min())
        is_cached = columns - pads < prompt.cached[:, None]
        # Like padding: nothing is written there.
        columns = torch.where(is_cached, pads - 1, columns)
    size = chunk or max(tokens.shape[1], 1)
    for first in range(start, tokens.shape[1], size):
        piece = slice(first, first + size)
        # A contiguous copy: strides of a slice vary with the length, and compiling depends on them.
        some = tokens[:, piece].contiguous()
        these = columns[..., piece].contiguous()
        model("target", some, these, logits_to_keep=1, any_length=True)
    model.cache.lengths.copy_(tokens.shape[1] - pads[:, 0])


def prefill_and_choose(
    model: NestedForward, prompt: Prompt, state: DecodingState, selection: Selection
) -> None:
    """Write a prompt that is more than token ids, and keep the token that follows it.

    The report is that of a round, and no round is counted.
    """
    width = prompt.tokens.shape[1]
    columns = torch.arange(width, device=prompt.tokens.device)
    logits = model.run("target", prompt.inputs, columns, logits_to_keep=1)[:, -1:]
    state.cache.lengths.copy_(width - 1 - state.pads[:, 0])
    last = state.last()
    tokens, accepted = selection.verify(logits, state.ids, last)
    state.keep(last, tokens, accepted)
    state.rounds.zero_()
