"""A small model with the keys of Qwen2: biases make a channel of each head far too large."""

from typing import Any

import small_models
import torch
from transformers import PreTrainedModel

FACTOR = 30.0
HEAD_DIM = 64


@torch.no_grad()
def build(factor: float = FACTOR, **options: Any) -> PreTrainedModel:
    """A Qwen2 in which a key channel of each head is so many times larger than the others.

    Rotary embeddings turn it into its partner, at D / 2 from it, so slowly that it is the larger
    of the two, and nearly constant, at all of the few hundred positions of a test. Queries are
    scaled up, so that what a head attends to depends on the other channels.

    Args:
        factor: the large channel over the root mean square of the rest; 0 leaves biases alone.
        **options: of ``small_models.build``.
    """
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "head_dim": HEAD_DIM}
    model = small_models.build("qwen2", **{**sizes, **options})
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight *= 1.5
        if factor:
            # Weights and biases give the other channels a variance of about 1 each.
            attention.k_proj.bias.view(-1, HEAD_DIM)[:, -2] = factor * 2**0.5
    return model
