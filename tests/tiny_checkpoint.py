"""A small random Llama with SmolLM2's tokenizer, in a folder: for the command line and the demo."""

from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from nestq.pretrained import load_model


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's; it comes with the model, which takes seconds to load."""
    return load_model("smollm2-135m")[1]


def save_dense(folder: Path) -> None:
    """Write the 16-bit original."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=144,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        intermediate_size=200,
        tie_word_embeddings=True,
        pad_token_id=2,
        eos_token_id=2,
        bos_token_id=1,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    # A tied head finds the token that came last, unless the layers say more than the embedding.
    model.model.embed_tokens.weight.data /= 10
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
