"""Models with the dimensions of public ones and random weights: what speed depends on.

How fast a model decodes follows from its dimensions. So it can be measured without its weights,
which take long to fetch: only how many draft tokens are accepted cannot.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from nestq.argument_checks import usable_device
from nestq.tensor import NestedQuantTensor

# Weights that are drawn at once: bounds the memory that a large head takes meanwhile.
DRAWN_AT_ONCE = 1 << 26
# Rows that are drawn at once are whole tiles.
ROW_STEP = 16
BIAS_SCALE = 0.1

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
}

# As the config.json of each model says.
_SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama-2-7b": (
        LlamaConfig,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
        },
    ),
    "llama-3-8b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-7b": (Qwen2Config, _QWEN_7B),
    "qwen2-7b": (Qwen2Config, _QWEN_7B),
    "llama-3.2-3b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _LLAMA_3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _LLAMA_3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "smollm2-135m": (
        LlamaConfig,
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
        },
    ),
}
SHAPES = tuple(_SHAPES)


def shape_config(name: str) -> PreTrainedConfig:
    """The configuration of a public model.

    Args:
        name: one of ``SHAPES``.
    """
    if name not in _SHAPES:
        raise ValueError(f"name must be one of {', '.join(SHAPES)}, got {name!r}")
    kind, settings = _SHAPES[name]
    return kind(**copy.deepcopy(settings))


def merged_shape(config: PreTrainedConfig) -> PreTrainedConfig:
    """A model of the same sizes whose query, key and value, and gate and up, are one linear each.

    What a strong baseline has: fewer and larger matrix products. It has no biases, where a Qwen2
    has few, and rotates without scaling, which costs the same.

    Args:
        config: of a Llama, Mistral, Qwen2, Qwen3 or Phi-3.
    """
    heads = config.num_attention_heads
    merged = Phi3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        max_position_embeddings=config.max_position_embeddings,
        original_max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        sliding_window=getattr(config, "sliding_window", None),
        tie_word_embeddings=config.tie_word_embeddings,
        pad_token_id=None,
    )
    merged.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return merged


def random_nested_model(
    config: PreTrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    group_size: int = 64,
    overlap: int = 8,
    progress: bool = True,
) -> PreTrainedModel:
    """A model with random weights, all linears nested, the head too.

    Weights are drawn on the device, one linear after the other, and rounded to nearest, so that
    there is never a dense copy of the model. Embedding and head are two parameters.

    Args:
        config: of the model; not changed.
        device: of the weights; on a GPU they lie in tiles.
        dtype: of embedding, norms and biases, and what the weights stand for.
        group_size: weights that share a scale.
        overlap: base steps are divided in this many target steps.
        progress: show a progress bar.

    Returns:
        The model in evaluation mode, without an end-of-sequence token.
    """
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False

    def nest(rows: Tensor) -> Tensor:
        return NestedQuantTensor.from_hp(rows, group_size, overlap)

    return _random_model(config, usable_device(device), dtype, nest, progress)


def random_dense_model(
    config: PreTrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
) -> PreTrainedModel:
    """A dense model with random weights, the baseline of a nested one.

    Args:
        config: of the model; not changed.
        device: of the weights.
        dtype: of the weights.
        progress: show a progress bar.

    Returns:
        The model in evaluation mode, without an end-of-sequence token.
    """
    return _random_model(
        copy.deepcopy(config), usable_device(device), dtype, lambda rows: rows, progress
    )


@torch.no_grad()
def _random_model(
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    stored: Callable[[Tensor], Tensor],
    progress: bool,
) -> PreTrainedModel:
    """A model whose linears are what ``stored`` makes of dense rows."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    draw = _Draw(device, dtype)
    modules = [module for module in model.modules() if list(module.parameters(recurse=False))]
    for module in tqdm(
        modules, desc="random weights", unit="layer", file=sys.stderr, disable=not progress
    ):
        if isinstance(module, nn.Linear):
            weight = _in_blocks(draw, module.out_features, module.in_features, stored)
            module.weight = nn.Parameter(weight, requires_grad=False)
            if module.bias is not None:
                bias = draw(*module.bias.shape, scale=BIAS_SCALE)
                module.bias = nn.Parameter(bias, requires_grad=False)
        elif isinstance(module, nn.Embedding):
            # Small beside what the layers add, and what a head has where it is the same parameter.
            embedding = draw(*module.weight.shape, scale=module.embedding_dim**-0.5)
            module.weight = nn.Parameter(embedding, requires_grad=False)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                ones = torch.ones(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(ones, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    _make_rotary_embeddings_real_(model, config, device)
    left = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if left:
        raise NotImplementedError(f"config must be of a known family: {left[0]} has no values")
    model.generation_config.eos_token_id = None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model.eval()


class _Draw:
    """Normal numbers, the same ones for every model of a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype

    def __call__(self, *shape: int, scale: float) -> Tensor:
        drawn = torch.randn(
            shape, generator=self.generator, dtype=self.dtype, device=self.generator.device
        )
        return drawn.mul_(scale)


def _in_blocks(draw: _Draw, rows: int, columns: int, stored: Callable[[Tensor], Tensor]) -> Tensor:
    """A weight ``[rows, columns]`` that keeps the size of activations, made in blocks of rows."""
    block = max(DRAWN_AT_ONCE // columns // ROW_STEP, 1) * ROW_STEP
    parts = [
        stored(draw(min(block, rows - start), columns, scale=columns**-0.5))
        for start in range(0, rows, block)
    ]
    if len(parts) == 1 or not isinstance(parts[0], NestedQuantTensor):
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    names, attributes = parts[0].__tensor_flatten__()
    planes = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return type(parts[0])(**planes, **attributes)


def _make_rotary_embeddings_real_(
    model: nn.Module, config: PreTrainedConfig, device: torch.device
) -> None:
    """Frequencies are buffers that follow from the config, and no file has them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "inv_freq"):
                setattr(parent, name, type(child)(config=config).to(device))


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
