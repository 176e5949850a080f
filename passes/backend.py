"""A compiler that runs the passes and nothing else: what decoding uses where the user has none.

After the passes nearly every node of a decoder layer is an operator of ours. In a CUDA graph they
cost what they cost in a graph of Inductor, and there is no code to generate and compile: tracing
takes seconds, where Inductor takes a minute or more for each view.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import PreTrainedModel

from nestq.passes.manager import run_passes

# Views, batch sizes, lengths and models that are traced before Dynamo gives up.
TRACES = 256


def passes_only(module: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Backend of ``torch.compile``: Dynamo's graph after the passes, run node by node."""
    run_passes(module.graph)
    module.recompile()
    return module.forward


def _call(model: PreTrainedModel, **inputs: Any) -> Any:
    return model(**inputs)


_traced_call = torch.compile(_call, backend=passes_only, fullgraph=True)


def traced(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's forward pass, traced when it is first called for a view and a shape.

    Args:
        model: a transformers model; it is given the keywords of the call.
    """

    def forward(**inputs: Any) -> Any:
        options: Any = {
            "recompile_limit": TRACES,
            "accumulated_recompile_limit": TRACES,
            # A hook that comes or goes later is not missed.
            "skip_nnmodule_hook_guards": False,
        }
        with torch._dynamo.config.patch(**options):
            return _traced_call(model, **inputs)

    return forward
