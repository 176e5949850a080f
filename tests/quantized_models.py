"""Small models to quantize, and how far from the 16-bit model they may be afterwards."""

from typing import Any

import small_models
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from nestq import bitnest_w4w8, quantize_
from nestq.report import QuantizationReport

RECIPE = bitnest_w4w8(group_size=32)
LINEARS = 15  # of a small Llama with two layers, head included

# What INT8 costs: a step is 1/127 of a row's largest value, which is about 4 times its RMS, and
# rounding errs by 1/sqrt(12) of a step: 0.9%.
INT8_ERROR = 0.01
# How much attention and gating may amplify the errors of linears.
AMPLIFICATION = 1.5


def calibration(model: PreTrainedModel, seed: int = 1) -> Tensor:
    return small_models.tokens(model, 16, 64, seed=seed)


def quantized(family: str = "llama-gqa", recipe: Any = RECIPE, **options: Any) -> PreTrainedModel:
    model = small_models.build(family)
    quantize_(model, recipe, **{"calibration": calibration(model), "progress": False, **options})
    return model


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).logits.float()


def distance(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def budget(report: QuantizationReport) -> float:
    """Largest distance of the target's logits from the 16-bit model's.

    Each linear errs by what the report says and by INT8 activations; errors of rounding are
    independent, so their squares add up.
    """
    squares = sum(entry.target_error**2 + INT8_ERROR**2 for entry in report.linears)
    return AMPLIFICATION * squares**0.5


def neox() -> PreTrainedModel:
    """Of an architecture that is not known, with 5 linears."""
    config = GPTNeoXConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=100,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPTNeoXForCausalLM(config).eval()
