"""The Walsh-Hadamard transform of vectors, with the bits of ``nestq.reference.hadamard``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestq.kernels.kv_vectors import butterfly, check_memory
from nestq.reference.hadamard import check_hadamard, hadamard_block

# Numbers that a program of one warp transforms, at least.
PROGRAM_NUMBERS = 512


@triton.jit
def hadamard_kernel(
    x,  # [A, B, C, BLOCKS * BLOCK] with the strides below
    out,  # the same, contiguous
    first_stride,
    second_stride,
    third_stride,
    second,
    third,
    total,  # A * B * C * BLOCKS
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    STEPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (block < total)[:, None]
    vector = block // BLOCKS
    at = (vector // third // second) * first_stride + (vector // third % second) * second_stride
    at += (vector % third) * third_stride + block % BLOCKS * BLOCK
    sums = tl.load(x + at[:, None] + column, mask=inside, other=0).to(tl.float32)
    for step in tl.static_range(STEPS):
        sums = butterfly(sums, 1 << step)
    sums = (sums * SCALE).to(out.dtype.element_ty)
    tl.store(out + block[:, None] * BLOCK + column, sums, mask=inside)


def hadamard(x: Tensor) -> Tensor:
    """Transform the last dimension; the bits are those of ``nestq.reference.hadamard``.

    Args:
        x: float16, bfloat16 or float32 ``[..., D]``, D even, contiguous along D.

    Returns:
        The transform, in the dtype of x, contiguous ``[..., D]``.

    Raises:
        ValueError: a dtype, size or stride is not as above.
    """
    check_hadamard(x)
    check_memory({"x": x}, {}, x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    size = x.shape[-1]
    states = x[(None,) * max(4 - x.dim(), 0)]
    states = states.reshape(-1, *states.shape[-3:])
    block = hadamard_block(size)
    together = max(PROGRAM_NUMBERS // block, 1)
    total = x.numel() // block
    hadamard_kernel[(triton.cdiv(total, together),)](
        states,
        out,
        *states.stride()[:3],
        *states.shape[1:3],
        total,
        BLOCKS=size // block,
        BLOCK=block,
        TOGETHER=together,
        STEPS=block.bit_length() - 1,
        SCALE=block**-0.5,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out
