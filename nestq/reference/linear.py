"""Linear layers on nested planes with INT8 activations and INT32 sums (BitNest paper, section 3).

Everything but the first and the last step is exact: activations and weight codes are integers, and
the scales of a weight row are 15-bit integers times one power of two. So the sum over all of K has
no rounding and no order, and the result of a row has the same bits whatever the other rows are, how
the sum is cut in parts and what computes it.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from nestq.reference.weights import (
    compose,
    dequantize,
    divide,
    fixed_point_scale,
    pad_to_groups,
    unpack_base,
    unpack_refinement,
)

# Weight rows are unpacked in blocks of about this many codes, so that they stay in a CPU's cache.
CACHED_CODES = 1 << 20
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Largest code of activations by their bits, and the share of a token's largest magnitude that it
# stands for: 4 bits clip a tenth of it off, as QuaRot does (arXiv 2404.00456, section 5).
ACTIVATION_LEVELS = {8: (127, 1.0), 4: (7, 0.9)}


def quantize_activation(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Per-token symmetric codes int8 ``[M, K]`` and their scale float32 ``[M, 1]``.

    With L the largest code and c the share of the largest magnitude that it stands for (127 and 1
    for 8 bits, 7 and 0.9 for 4)::

        scale = c max|x| / L        code = clip(round(x / scale), -L, L)

    A row of zeros gets zero codes, and so does one whose scale has no inverse in float32.

    Args:
        x: floating point ``[M, K]``.
        bits: of the codes, 8 or 4.
    """
    levels, share = ACTIVATION_LEVELS[bits]
    x = x.float()
    scale = divide(x.abs().amax(-1, keepdim=True) * share, levels)
    # One division a row instead of one a value: kernels do the same.
    inverse = 1 / torch.where(scale > SMALLEST_SCALE, scale, 1)
    return (x * inverse).round().clamp(-levels, levels).to(torch.int8), scale


@cache
def _int_mm_is_exact() -> bool:
    """Whether this CPU's int8 matmul sums without saturation (some do not, lacking VNNI)."""
    a = torch.full((2, 256), 127, dtype=torch.int8)
    b = torch.full((256, 16), -128, dtype=torch.int8)
    return bool((torch._int_mm(a, b) == 256 * 127 * -128).all())


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Exact ``a @ b.T`` of int8 ``[M, g]`` and ``[N, g]`` with g <= 512: integers ``[M, N]``.

    Both branches are exact: a float32 sum of products below 2^14 needs at most 2^23 for 512 terms.
    """
    if a.device.type == "cpu" and _int_mm_is_exact():
        return torch._int_mm(a, b.T)
    return a.float() @ b.float().T


def nested_linear(
    x: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    overlap: int,
    activation_bits: int = 8,
) -> Tensor:
    """``x @ W.T + bias`` where W is the target's weight, or the draft's if refinement is None.

    Args:
        x: ``[..., K]`` floating point; quantized per row (:func:`quantize_activation`).
        base: uint8 ``[N, Kp / 2]``.
        refinement: uint8 ``[N, Kp / 2]`` or None.
        scale: ``[N, G]``.
        bias: ``[N]`` or None.
        group_size: codes that share a scale.
        overlap: base steps are divided in this many target steps.
        activation_bits: 8 or 4.

    Returns:
        ``[..., N]`` in the dtype of x.
    """
    rows = pad_to_groups(x.reshape(-1, x.shape[-1]), group_size)
    activation, activation_scale = quantize_activation(rows, activation_bits)
    block = base.shape[0]
    if x.device.type == "cpu":
        block = max(1, CACHED_CODES // rows.shape[1])
    scale_codes, unit = fixed_point_scale(scale)
    sums = []
    for start in range(0, base.shape[0], block):
        part = slice(start, start + block)
        refinement_part = None if refinement is None else refinement[part]
        sums.append(
            _exact_sums(
                activation, base[part], refinement_part, scale_codes[part], group_size, overlap
            )
        )
    divisor = 1 if refinement is None else overlap
    out = torch.cat(sums, dim=-1).float() * (divide(activation_scale, divisor) * unit)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], base.shape[0])


def _exact_sums(
    activation: Tensor,
    base: Tensor,
    refinement: Tensor | None,
    scale_codes: Tensor,
    group_size: int,
    overlap: int,
) -> Tensor:
    """Sum over groups of ``scale code * (activation . codes)``: integers in float64 ``[M, N]``.

    A term is below 2^37, so 2^16 groups sum exactly.
    """
    codes = unpack_base(base, group_size)
    if refinement is not None:
        codes = compose(codes, unpack_refinement(refinement, group_size), overlap)
    group_scale = scale_codes.T.double()
    total = torch.zeros(
        activation.shape[0], base.shape[0], dtype=torch.float64, device=activation.device
    )
    for group, start in enumerate(range(0, activation.shape[1], group_size)):
        span = slice(start, start + group_size)
        total.addcmul_(
            integer_matmul(activation[:, span], codes[:, span]).double(), group_scale[group]
        )
    return total


def base_linear(
    x: Tensor,
    base: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    activation_bits: int,
    float32_weight: Callable[[Tensor, Tensor, int, int], Tensor] | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with W the weight of a base plane, ``q * s``.

    With 16 bits the activations stay as they are: W is exact in float32 (4 bits times 15), products
    and sums are in float32, or in float64 for x in float64, and the result is rounded to the dtype
    of x once. A token is multiplied at a time, as in :func:`linear_16`. With 4 bits it is
    :func:`nested_linear`.

    Args:
        x: ``[..., K]`` floating point.
        base: uint8 ``[N, Kp / 2]``.
        scale: ``[N, G]``.
        bias: ``[N]`` or None.
        group_size: codes that share a scale.
        activation_bits: 4 or 16.
        float32_weight: what makes float32 ``[n, K]`` of rows of base and scale, the group size and
            K, if it is not to be :func:`nestq.reference.weights.dequantize`, whose bits it has.

    Returns:
        ``[..., N]`` in the dtype of x.
    """
    if activation_bits == 4:
        return nested_linear(x, base, None, scale, bias, group_size, 1, activation_bits)
    if activation_bits != 16:
        raise ValueError(f"activation_bits must be 4 or 16, got {activation_bits}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    columns = x.shape[-1]
    rows = x.reshape(-1, columns).to(dtype)
    block = max(1, CACHED_CODES // max(columns, 1))
    parts = []
    for base_part, scale_part in zip(base.split(block), scale.split(block), strict=True):
        if float32_weight is not None and dtype == torch.float32:
            weight = float32_weight(base_part, scale_part, group_size, columns)
        else:
            weight = dequantize(base_part, None, scale_part, group_size, 1, columns, dtype)
            weight = weight.contiguous()  # without the padding
        parts.append(linear_16(rows, weight, None))
    out = torch.cat(parts, dim=-1)
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(x.dtype).view(*x.shape[:-1], base.shape[0])


def linear_16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of a dense weight, one row at a time.

    A matrix product may sum in another order for another number of rows, so that a row's bits
    would depend on its neighbours.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, in the dtype of x.
        bias: ``[N]`` or None.
    """
    rows = x.reshape(-1, 1, x.shape[-1])
    if len(rows) == 0:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    out = torch.cat([torch.nn.functional.linear(row.clone(), weight, bias) for row in rows])
    return out.view(*x.shape[:-1], weight.shape[0])
