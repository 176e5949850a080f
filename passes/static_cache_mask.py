"""What queries see by the mask of an attention, wherever they are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from nestq.passes.captured_call import getattr_path
from nestq.passes.graph_nodes import argument
from nestq.passes.graph_values import evaluate
from nestq.passes.static_cache_inputs import CallInputs
from nestq.passes.static_cache_update import Update, no_cache


def sliding_window(inputs: CallInputs, attention: Node, update: Update, root: Node | None) -> int:
    """Compare what queries see with the positions up to their own, wherever they are.

    Args:
        inputs: of the module.
        attention: with a mask, or is_causal, or neither.
        update: of the keys that it reads.
        root: the input that says positions; None if nothing does.

    Returns:
        Keys that a query sees, itself included; 0 for all up to its own position.

    Raises:
        ValueError: a query sees other keys.
    """
    slots = torch.arange(update.shape[2])
    window: int | None = None
    for known in inputs.sweep(root, update.shape[2], update.count):
        positions, visible = _visible(inputs, attention, update, known)
        if window is None:  # of the last query: the sweep begins with the last positions
            last = int(positions[0, -1])
            seen = int(visible[0, 0, -1].sum())
            window = seen if seen <= last else 0
        distance = positions[:, None, :, None].cpu() - slots
        expected = distance >= 0
        if window:
            expected &= distance < window
        if (visible != expected).any():
            raise no_cache(
                update.buffer,
                "the mask of its attention does not let each query see the positions up to its "
                f"own, and no others: at positions {positions[0].tolist()[:8]} it is another",
            )
    assert window is not None
    return window


def _visible(
    inputs: CallInputs, attention: Node, update: Update, known: Mapping[Node, Any]
) -> tuple[Tensor, Tensor]:
    """Positions ``[B, n]``, and what they see, bool ``[B or 1, H or 1, n, S]``."""
    mask = argument(attention, 3, "attn_mask")
    is_causal = argument(attention, 5, "is_causal", False)
    if mask is not None and is_causal:
        raise no_cache(update.buffer, "its attention has a mask and is_causal")
    memory: dict[Node, Any] = {}
    buffer = getattr_path(inputs.module, update.buffer)
    no_numbers = torch.empty(1, dtype=buffer.dtype, device=buffer.device).expand(buffer.shape)
    known = {**known, update.node_of_buffer: no_numbers}
    positions = update.positions(lambda node: evaluate(node, known, memory))
    keys = evaluate(argument(attention, 1, "key"), known, memory).shape[2]
    visible = torch.ones(positions.shape[1], keys, dtype=torch.bool)
    if is_causal:
        visible = visible.tril()
    if mask is not None:
        seen = _seen(evaluate(mask, known, memory), update.buffer).cpu()
        visible = seen.expand(*seen.shape[:-2], *visible.shape)
    visible = visible.reshape((1,) * (4 - visible.dim()) + visible.shape)
    return positions, torch.nn.functional.pad(visible, (0, update.shape[2] - keys))


def _seen(mask: Tensor, name: str) -> Tensor:
    """bool: where a mask lets a query see a key."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not (seen | (mask <= torch.finfo(mask.dtype).min)).all():
        raise no_cache(name, "the mask of its attention adds other numbers than 0 and -inf")
    return seen
