"""What ``nestq::fused_linear`` does to its input before it multiplies.

The functions are those that transformers' modules call, so that the bits are theirs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nestq.reference.pointwise import same_bits_anywhere


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32, rounded to the dtype of x before the weight."""
    widened = x.to(torch.float32)
    variance = widened.pow(2).mean(-1, keepdim=True)
    normed = widened * torch.rsqrt(variance + eps)
    return weight * normed.to(x.dtype)


def fused_input(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The value that linears read, and the sum of the residual stream.

    Args:
        x: ``[..., K]`` floating point.
        residual: the same, or None.
        norm_weight: ``[K]`` of an RMSNorm, or None.
        eps: of the norm.
        gate: as x, or None; not together with a residual or a norm.

    Returns:
        ``norm(x + residual)`` as far as they are given, or ``silu(gate) * x``; and
        ``x + residual``, or an empty tensor.
    """
    if gate is not None:
        if residual is not None or norm_weight is not None:
            raise ValueError("gate must be None where there is a residual or a norm_weight")
        return same_bits_anywhere(F.silu, gate) * x, x.new_empty(0)
    total = x.new_empty(0)
    if residual is not None:
        x = total = (x + residual).contiguous()
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    return x, total
