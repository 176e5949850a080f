"""Keys and values of a split, loaded as the threads of four warps need them for their operands.

A warp takes 64 keys of a split, eight groups of eight that lie 32 keys apart. In the operand of a
matrix instruction a lane has g = lane // 4 and t = lane % 4. Of keys it holds the elements of t for
the key g of a group; of values, the elements of g for the keys 2 * t and 2 * t + 1. The order of
elements in a sum is free, so a lane takes them as they lie together in memory.

What is read is BASE, BOTH planes, RECENT (the base, and the refinement in splits with a recent
key), or DENSE 16-bit numbers. Planes are read in words of four bytes. A split is a tuple of one
tuple for BASE, else of two: base and refinement, or the low and the high half of dense elements;
these hold a tensor a load, whose first dimension is the threads.
"""

import triton
import triton.language as tl

from nestq.kernels.kv_codes import BASE, DENSE, RECENT


@triton.jit
def load_plane(plane, key, element, inside, HALF: tl.constexpr, READ: tl.constexpr):
    """Words of a key's ``HALF`` bytes, which may end within a word, or elements of its half."""
    if READ == DENSE:
        at = key.to(tl.int64) * (2 * HALF) + element
        return tl.load(plane + at, mask=inside & (element < HALF), other=0)
    elif HALF % 4 == 0:
        words = plane.to(tl.pointer_type(tl.int32), bitcast=True)
        at = key.to(tl.int64) * (HALF // 4) + element
        return tl.load(words + at, mask=inside & (element < HALF // 4), other=0)
    else:
        words = tl.zeros(element.shape, tl.int32)
        for i in tl.static_range(4):
            byte = 4 * element + i
            part = tl.load(plane + key * HALF + byte, mask=inside & (byte < HALF), other=0)
            words |= (part.to(tl.int32) & 0xFF) << (8 * i)
        return words


@triton.jit
def load_keys(
    base,
    refinement,
    start,  # first key of the split
    limit,  # key behind the last one to load
    fine_start,  # first key whose refinement is loaded, for RECENT
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    VECTOR: tl.constexpr,  # elements that a thread loads at once
    READ: tl.constexpr,
):
    """A tensor a group and piece of a half: words in pairs ``[128, N, 2]``, or dense elements."""
    P: tl.constexpr = PADDED // (4 * VECTOR)
    N: tl.constexpr = VECTOR if READ == DENSE else VECTOR // 4
    thread = tl.arange(0, 128)[:, None]
    # In 64 bits, so that loads differ by a constant that is part of the instruction.
    first = start + thread // 4
    first_key = first.to(tl.int64)
    first_element = (thread % 4 * N + tl.arange(0, N)[None, :]).to(tl.int64)
    coarse = ()
    fine = ()
    for i in tl.static_range(8 * P):
        key = first_key + i // P * 32
        element = first_element + i % P * (4 * N)
        inside = first < limit - i // P * 32
        x = load_plane(base, key, element, inside, HALF, READ)
        coarse = coarse + (x if READ == DENSE else x.reshape(128, N // 2, 2),)
        if READ != BASE:
            plane = base + HALF if READ == DENSE else refinement
            if READ == RECENT:
                inside = inside & (first >= fine_start - i // P * 32)
            x = load_plane(plane, key, element, inside, HALF, READ)
            fine = fine + (x if READ == DENSE else x.reshape(128, N // 2, 2),)
    return coarse, fine


@triton.jit
def load_values(
    base,
    refinement,
    start,
    limit,
    fine_start,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    READ: tl.constexpr,
):
    """A tensor a group ``[128, N, 2]``: words or dense elements, of two keys."""
    N: tl.constexpr = PADDED // 8 if READ == DENSE else PADDED // 32
    thread = tl.arange(0, 128)[:, None]
    element = (thread % 32 // 4 * N + tl.arange(0, N)[None, :]).to(tl.int64)
    first_even = start + thread // 32 * 8 + thread % 4 * 2
    first_key = first_even.to(tl.int64)
    coarse = ()
    fine = ()
    for i in tl.static_range(8):
        even = first_key + i * 32
        odd = even + 1
        even_inside = first_even < limit - i * 32
        odd_inside = first_even < limit - i * 32 - 1
        first = load_plane(base, even, element, even_inside, HALF, READ)
        second = load_plane(base, odd, element, odd_inside, HALF, READ)
        coarse = coarse + (tl.join(first, second),)
        if READ != BASE:
            plane = base + HALF if READ == DENSE else refinement
            if READ == RECENT:
                even_inside = even_inside & (first_even >= fine_start - i * 32)
                odd_inside = odd_inside & (first_even >= fine_start - i * 32 - 1)
            first = load_plane(plane, even, element, even_inside, HALF, READ)
            second = load_plane(plane, odd, element, odd_inside, HALF, READ)
            fine = fine + (tl.join(first, second),)
    return coarse, fine


@triton.jit
def join_halves(parts):
    HALF: tl.constexpr = len(parts) // 2
    joined = ()
    for i in tl.static_range(HALF):
        joined = joined + (tl.join(parts[i], parts[i + HALF]),)
    return joined


@triton.jit
def stacked(parts):
    """8 or 16 tensors along as many bits of an index, the highest first, as last dimensions."""
    parts = join_halves(join_halves(join_halves(parts)))
    if len(parts) == 2:
        parts = join_halves(parts)
    return parts[0]
