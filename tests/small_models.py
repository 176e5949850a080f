"""Small random causal language models of every supported family.

    model = build("qwen2", size="odd", tied=True)

Weights are scaled to keep activations near one, so that logits differ clearly between tokens.
Biases and norm weights are random too: a fold that forgets one changes the output.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Families that take both rotations. The value: model_type, and what the config adds.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": None}),
    "llama-gqa": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
}
FAMILIES = list(_FAMILIES)

# Its residual stream cannot be rotated, only its values.
_GEMMA2: tuple[str, dict[str, Any]] = ("gemma2", {})

_SIZES: dict[str, dict[str, int]] = {
    # For speed; the heads are wider than the residual stream.
    "small": {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 100,
        "vocab_size": 97,
    },
    # Sizes that are no multiple of a group of 128, and no power of two.
    "odd": {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1000,
        "vocab_size": 499,
    },
}


def build(
    family: str,
    size: str = "small",
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> PreTrainedModel:
    """A model in evaluation mode with two decoder layers and a context of 512.

    Args:
        family: one of `FAMILIES`, or `"gemma2"`.
        size: `"small"` or `"odd"`.
        tied: whether embedding and head are one parameter.
        seed: of the weights; the global random state is left alone.
        dtype: of the weights, drawn in float32.
        **config_overrides: attributes of the config, for example `num_hidden_layers=1` or
            `attention_bias=True`.
    """
    model_type, extra = _GEMMA2 if family == "gemma2" else _FAMILIES[family]
    settings = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": tied,
        **_SIZES[size],
        **extra,
        **config_overrides,
    }
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):  # transformers draws weights of its own
        # Not `model.to(dtype)`, which would round the frequencies of RoPE, too.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _randomize_(model, tied, torch.Generator().manual_seed(seed))
    return model.eval()


@torch.no_grad()
def _randomize_(model: nn.Module, tied: bool, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 and not name.endswith("bias"):
            values = 1.0 + 0.2 * values  # a norm, whose neutral weight is 1 (0 for Gemma)
        elif parameter.dim() == 2 and (tied or "embed" not in name):  # tied, it is the head, too
            values *= parameter.shape[1] ** -0.5
        parameter.copy_(values)


def exact_(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model compute in float64 throughout, in place, for comparisons to 1e-9.

    Norms of transformers compute in float32 whatever the dtype of the model; they are replaced by
    PyTorch's. Cosines and sines stay float32 numbers: the same ones for every model. Gemma's
    attention keeps a softmax in float32.
    """
    model.double()
    module: Any
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if not type(module).__name__.endswith("RMSNorm"):
                continue
            gemma = type(module).__name__.startswith("Gemma")
            epsilon = module.eps if gemma else module.variance_epsilon
            norm = nn.RMSNorm(module.weight.shape, eps=epsilon, dtype=torch.float64)
            offset = 1.0 if gemma else 0.0  # Gemma multiplies by 1 + weight
            norm.weight = nn.Parameter(module.weight.detach() + offset)
            setattr(parent, name, norm)
    return model


def tokens(model: PreTrainedModel, batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]`, none of them the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator)
