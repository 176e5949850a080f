"""Inputs of a captured module, and how they say positions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from nestq.passes.captured_call import CapturedCall, as_tensor, getattr_path
from nestq.passes.graph_values import sources

# Scores that are looked at for each mask: at every position, or in a large cache at fewer.
_SCORES = 1 << 26


@dataclass(frozen=True)
class CallInputs:
    """What a captured graph is given.

    Attributes:
        module: that was captured.
        call: the capture.
    """

    module: nn.Module
    call: CapturedCall

    def read_by(self, node: Any) -> set[Node]:
        """Inputs whose numbers a node depends on: of a tensor not its sizes alone."""
        ints = {
            one
            for index, one in self.call.inputs.items()
            if not isinstance(self.call.example[index], Tensor)
        }
        by_value = sources(node) & set(self.call.inputs.values())
        return by_value | (ints & sources(node, sizes=True))

    def at(self, root: Node, start: int) -> list[Any]:
        """The example at positions from a start on: inputs of positions are these, in a row."""
        values = list(self.call.example)
        index = next(i for i, node in self.call.inputs.items() if node is root)
        first = values[index]
        if isinstance(first, Tensor):
            size = first.shape[-1] if first.dim() else 1
            line = torch.arange(start, start + size, device=first.device).view(first.shape[-1:])
            values[index] = line.to(first.dtype).expand(first.shape).clone()
        else:
            values[index] = start
        return values

    def sweep(self, root: Node | None, slots: int, count: int) -> Iterator[dict[Node, Any]]:
        """Values of placeholders at many positions, the last ones first, then the example.

        Args:
            root: the input that says positions; None for the example alone.
            slots: positions of a cache.
            count: how many of them the example writes.
        """
        if root is not None:
            starts = range(slots - count, -1, -1)
            most = max(1, _SCORES // (slots * count))
            for start in starts[:: -(-len(starts) // most)]:
                values = self.at(root, start)
                if self.call.fits(values):
                    yield self.known(values)
        yield self.known()

    def known(self, values: Sequence[Any] | None = None) -> dict[Node, Any]:
        values = self.call.example if values is None else values
        inputs = {node: as_tensor(values[index]) for index, node in self.call.inputs.items()}
        attributes = self.call.attributes.items()
        return inputs | {node: getattr_path(self.module, name) for node, name in attributes}

    def name(self, placeholder: Node) -> str:
        index = next(i for i, node in self.call.inputs.items() if node is placeholder)
        return self.call.names[index]
