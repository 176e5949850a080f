"""Elementwise functions whose result does not depend on where an element lies in memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# PyTorch's CPU kernels run a call of this many elements in one thread, without a scalar tail.
VECTOR_CHUNK = 1 << 15
VECTOR_MULTIPLE = 64


def same_bits_anywhere(
    function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Apply an elementwise function so that equal elements give equal bits, wherever they lie.

    On a CPU the vector and the scalar form of a function may differ in the last bit, and which of
    them an element meets depends on its offset and on the number of threads, so on the number of
    rows. Here no element meets a scalar loop tail.

    Args:
        function: elementwise function of one tensor.
        input: tensor of any shape; the name is the one that PyTorch's functions give it.
        *args: passed on to the function.
        **kwargs: passed on to the function.

    Returns:
        A new tensor of the shape of the input, which is never written.
    """
    if input.device.type != "cpu":
        return function(input, *args, **kwargs)
    flat = F.pad(input.reshape(-1), (0, -input.numel() % VECTOR_MULTIPLE))
    chunks = [function(chunk, *args, **kwargs) for chunk in flat.split(VECTOR_CHUNK)]
    return torch.cat(chunks)[: input.numel()].view(input.shape)
