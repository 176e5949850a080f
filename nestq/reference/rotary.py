"""Rotary embedding of queries and keys as transformers computes it, and writing into the cache.

``states * cos + rotate_half(states) * sin`` in the dtype of the states, each operation rounded::

    rotate_half([x1, x2]) = [-x2, x1]        x1 and x2 the halves of a vector
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nestq.reference.hadamard import hadamard
from nestq.reference.kv import check_planes, check_positions, kv_append

Planes = tuple[Tensor, Tensor, Tensor]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys ``[B, H, n, D]`` by angles ``[B or 1, n, D]``."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return states * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rotate_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_base: Tensor,
    key_refinement: Tensor,
    key_scale: Tensor,
    value_base: Tensor,
    value_refinement: Tensor,
    value_scale: Tensor,
    transform: bool = False,
    append: Callable[..., None] = kv_append,
    hadamard: Callable[[Tensor], Tensor] = hadamard,
) -> Tensor:
    """Rotate queries and keys, and write rotated keys and values into the cache, in place.

    Args:
        query: ``[B, H, n, D]``.
        key: ``[B, H_kv, n, D]``, in the dtype of query.
        value: the same.
        cos: ``[B or 1, n, D]``, in the dtype of query.
        sin: the same.
        positions: int64 ``[B, n]``, as in :func:`nestq.reference.kv.kv_append`: nothing is written
            for a pad, whose query is rotated all the same.
        key_base: uint8 ``[B, H_kv, S, D / 2]``.
        key_refinement: the same.
        key_scale: float32 ``[B, H_kv, S]``.
        value_base: as of keys.
        value_refinement: as of keys.
        value_scale: as of keys.
        transform: whether rotated queries and keys are then transformed by
            :func:`nestq.reference.hadamard.hadamard`.
        append: what writes; it takes the arguments of :func:`nestq.reference.kv.kv_append`.
        hadamard: what transforms.

    Returns:
        The rotated queries, transformed if keys are, contiguous ``[B, H, n, D]``.

    Raises:
        ValueError: a dtype or shape does not fit or, on a CPU, a position is not below S.
    """
    keys, values = (
        (key_base, key_refinement, key_scale),
        (value_base, value_refinement, value_scale),
    )
    check_rotate_append(query, key, value, cos, sin, positions, keys, values)

    def turned(states: Tensor) -> Tensor:
        rotated = rotate(states, cos, sin)
        return hadamard(rotated) if transform else rotated

    append(turned(key), positions, *keys)
    append(value, positions, *values)
    return turned(query).contiguous()


def check_rotate_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Planes,
    values: Planes,
) -> None:
    """Refuse arguments of :func:`rotate_append` whose dtypes or shapes do not fit, by name."""
    check_planes("key", *keys)
    check_planes("value", *values)
    batch, heads, capacity, half = keys[0].shape
    if values[0].shape != keys[0].shape:
        raise ValueError(
            f"value base must have the shape of key base {tuple(keys[0].shape)}, "
            f"got {tuple(values[0].shape)}"
        )
    if query.dim() != 4 or (query.shape[0], query.shape[3]) != (batch, 2 * half):
        raise ValueError(
            f"query must be [B, H, n, D] for a key base {tuple(keys[0].shape)} "
            f"[B, H_kv, S, D / 2], got {tuple(query.shape)}"
        )
    count, dtype = query.shape[2], query.dtype
    shape = (batch, heads, count, 2 * half)
    for name, states in (("key", key), ("value", value)):
        if states.shape != shape or states.dtype != dtype:
            raise ValueError(
                f"{name} must be {dtype} of shape {shape}, as query and planes are, "
                f"got {states.dtype} of shape {tuple(states.shape)}"
            )
    shapes = ((batch, count, 2 * half), (1, count, 2 * half))
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.shape not in shapes or angle.dtype != dtype:
            raise ValueError(
                f"{name} must be {dtype} of shape {shapes[0]} or {shapes[1]}, "
                f"got {angle.dtype} of shape {tuple(angle.shape)}"
            )
    if cos.shape != sin.shape:
        raise ValueError(
            f"sin must have the shape of cos {tuple(cos.shape)}, got {tuple(sin.shape)}"
        )
    check_positions(positions, batch, count, capacity)
