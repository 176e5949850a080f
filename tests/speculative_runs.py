"""Small nested models and prompts to decode speculatively."""

from functools import cache
from typing import Any

import small_models
import torch
from nested_models import nest_
from torch import Tensor
from transformers import PreTrainedModel

from nestq.kv_cache import NestedKVCache
from nestq.speculative import SpeculativeOutput, speculative_generate

PAD = 0
NEW = 16


@cache
def nested_model(family: str = "llama-gqa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model that several tests share; it has no end-of-sequence token."""
    model = nest_(small_models.build(family, dtype=dtype))
    model.generation_config.eos_token_id = None
    return model


def padded_prompts(model: PreTrainedModel, pads: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Random prompts ``[B, width]``, left-padded, and their mask."""
    tokens = small_models.tokens(model, len(pads), width)
    mask = torch.arange(width) >= torch.tensor(pads)[:, None]
    return tokens.masked_fill(~mask, PAD), mask.long()


def run(model: PreTrainedModel, tokens: Tensor, gamma: Any, **options: Any) -> SpeculativeOutput:
    """``NEW`` tokens by default."""
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    output = speculative_generate(model, tokens, gamma=gamma, **options)
    assert isinstance(output, SpeculativeOutput)
    return output


def cache_of(output: SpeculativeOutput) -> NestedKVCache:
    """The cache, whose name depends on the version of transformers."""
    return output["cache" if "cache" in output else "past_key_values"]
