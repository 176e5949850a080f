"""Whether two results are the same."""

import torch
from torch import Tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shapes, strides, dtypes and bits, where any NaN is as good as another."""
    formats = [(x.shape, x.stride(), x.dtype) for x in (one, other)]
    if formats[0] != formats[1] or not torch.equal(one.isnan(), other.isnan()):
        return False
    numbers = [x.masked_fill(x.isnan(), 0) for x in (one, other)]
    return torch.equal(*numbers) and torch.equal(*(x.signbit() for x in numbers))
