"""A small random Llava: a CLIP tower, a projector and a Llama, and prompts with images."""

import small_models
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

IMAGE_TOKEN = 96
# Of an image: (8 / 4) ** 2 patches, without the class token.
IMAGE_TOKENS = 4
_SIZE = 8


def build_llava(family: type[LlamaConfig] = LlamaConfig, seed: int = 0) -> PreTrainedModel:
    """In evaluation mode, in float32, without an end-of-sequence token."""
    text = family(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=100,
        vocab_size=97,
        num_hidden_layers=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_SIZE,
        patch_size=4,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlavaForConditionalGeneration(config)
    small_models._randomize_(model, False, torch.Generator().manual_seed(seed))
    return model.eval()


def image_prompts(batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids ``[B, 10]`` with an image each, and pixels ``[B, 3, 8, 8]``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 96, (batch, 10), generator=generator)
    tokens[:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
    return tokens, torch.randn(batch, 3, _SIZE, _SIZE, generator=generator)
