"""The models that are measured: public shapes with random weights, or nested checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedModel

from nestq.bench.shapes import (
    SHAPES,
    merged_shape,
    random_dense_model,
    random_nested_model,
    shape_config,
)
from nestq.command_line import fetch
from nestq.passes.backend import traced
from nestq.plane_placement import place_side_by_side_
from nestq.pretrained import load_model, read_nested_config
from nestq.speculative.requests import check_model
from nestq.tensor import NestedQuantTensor

Compiler = Literal["passes", "inductor", "none"]

# Contexts, batches, kinds of reads and of steps that one model is compiled for.
COMPILED_GRAPHS = 256


class Source:
    """A model by name, fetched or made when it is needed.

    Args:
        name: one of ``SHAPES``, or a nested checkpoint: hub id or folder.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: it is not nested.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_shape = name in SHAPES
        if not self.is_shape:
            fetch(read_nested_config, name)

    @property
    def weights(self) -> str:
        """Where weights come from."""
        return "random" if self.is_shape else "checkpoint"

    def dense(self, device: torch.device) -> PreTrainedModel:
        """A 16-bit model of the same shape, its linears merged; its weights are random."""
        if self.is_shape:
            return random_dense_model(merged_shape(shape_config(self.name)), device)
        config = fetch(AutoConfig.from_pretrained, self.name)
        dtype = torch.float16 if config.dtype == torch.float16 else torch.bfloat16
        return random_dense_model(merged_shape(config), device, dtype)

    def nested(self, device: torch.device) -> tuple[PreTrainedModel, Any]:
        """The nested model and its tokenizer, None for a shape."""
        if self.is_shape:
            return random_nested_model(shape_config(self.name), device), None
        model, tokenizer = fetch(load_model, self.name)
        check_model(model)
        return model.to(device), tokenizer


def ready(model: PreTrainedModel, compiler: Compiler) -> Callable[..., Any]:
    """What computes: the model, or what a compiler makes of it inside :func:`compiling`.

    All that changes a model or its graphs for speed is done here.
    """
    place_side_by_side_(model)
    if compiler == "none":
        return model
    if compiler == "passes" and any(isinstance(w, NestedQuantTensor) for w in model.parameters()):
        return traced(model)
    # A length that the compiler takes for variable would make slower kernels.
    return torch.compile(model, fullgraph=True, dynamic=False)


@contextmanager
def compiling() -> Iterator[None]:
    """Context in which one model may be compiled for many shapes, and is never left uncompiled."""
    limits: Any = {
        "recompile_limit": COMPILED_GRAPHS,
        "accumulated_recompile_limit": COMPILED_GRAPHS,
        "fail_on_recompile_limit_hit": True,
    }
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(**limits):
            yield
    finally:
        # Compiled graphs hold on to the model.
        torch._dynamo.reset()
