"""Counter-based uniform random numbers: a function of a key and a counter, with no state.

The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), in int64 operations that wrap around.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four random words.

    Args:
        counter: four int64 tensors with numbers of 32 bits, which broadcast.
        key: two such tensors.

    Returns:
        Four int64 tensors with numbers of 32 bits.
    """
    for _ in range(_ROUNDS):
        # The upper half of a product is right although int64 overflows: the product is exact modulo
        # 2**64, and the sign that the shift copies is cut off.
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = (
            (second >> 32 & _WORD) ^ counter[1] ^ key[0],
            second & _WORD,
            (first >> 32 & _WORD) ^ counter[3] ^ key[1],
            first & _WORD,
        )
        key = tuple((k + step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True))
    return counter


def uniforms(seeds: Tensor, streams: Tensor, positions: Tensor, purposes: int) -> Tensor:
    """Uniform random numbers in [0, 1), multiples of 2**-53.

    Args:
        seeds: int64 ``[B]``.
        streams: int64 ``[B]``, from 0 to 2**32 - 1: streams of one seed are independent.
        positions: int64 ``[B, n]``, taken modulo 2**32.
        purposes: even, independent numbers for each position.

    Returns:
        float64 ``[B, n, purposes]``; each number depends on its own seed, stream, position and
        purpose alone.
    """
    seed = seeds[:, None, None]
    pairs = torch.arange(purposes // 2, device=positions.device)
    counter = (positions[..., None] & _WORD, streams[:, None, None], pairs, torch.zeros_like(pairs))
    words = torch.stack(philox(counter, (seed & _WORD, seed >> 32 & _WORD)), -1)
    high, low = words[..., ::2], words[..., 1::2]
    bits = (high << 21) | (low >> 11)
    return (bits.double() * 2.0**-53).flatten(2)
