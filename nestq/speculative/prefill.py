"""How prompts go through the model: what computes them, and how many columns at once."""

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from nestq.progress import said_if_slow
from nestq.speculative.graphs import CapturedDecoding
from nestq.speculative.prompts import Prompt

# Memory that the widest activation of a forward pass may take, about.
ACTIVATION_BYTES = 1 << 28
# A pass of fewer tokens would not keep a GPU busy.
LEAST_COLUMNS = 512
_BYTES_OF_A_NUMBER = 4  # of sums, whatever the dtype of the model


def prompt_columns(model: PreTrainedModel, prompt: Prompt, given: int | None) -> int | None:
    """Columns of a forward pass over a prompt; None for all.

    A long prompt goes through the model in pieces, so that activations do not grow with it. A row
    does not depend on the other rows, so that the pieces give what the whole would.

    Args:
        model: that decodes.
        prompt: to read; one that is more than token ids is read at once.
        given: by the user.
    """
    if given is not None or prompt.inputs:
        return given
    config: Any = model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = 2 * inner  # gate and up
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        widest = max(widest, config.vocab_size)
    columns = ACTIVATION_BYTES // (len(prompt.tokens) * widest * _BYTES_OF_A_NUMBER)
    return max(columns, LEAST_COLUMNS)


def prompt_forward(
    model: PreTrainedModel, forward: Callable[..., Any], captured: CapturedDecoding, in_graph: bool
) -> Callable[..., Any]:
    """What computes prompts: where rounds are graphs of the traced model, that model, too.

    It is traced once for prompts of any length. One that cannot be, says so, and computes itself.

    Args:
        model: the transformers model.
        forward: what computes: the model, or what ``torch.compile`` made of it.
        captured: of the call.
        in_graph: whether rounds are graphs.
    """
    is_compiled = forward is not model or model._compiled_call_impl is not None
    if not in_graph or is_compiled or captured.untraceable:
        return forward
    # Rounds were traced already: the import costs nothing more.
    from nestq.passes.backend import traced

    ours = traced(model)
    first = True

    def forward_of_prompts(**inputs: Any) -> Any:
        nonlocal first
        if not captured.untraceable:
            slow, first = first, False
            try:
                with said_if_slow("tracing the model for prompts") if slow else nullcontext():
                    return ours(**inputs)
            # Nothing has been computed then: a model is traced as a whole, before it runs.
            except torch._dynamo.exc.TorchDynamoException as error:
                captured.untraceable = True
                warnings.warn(
                    f"{type(model).__name__} cannot be traced for prompts of any length, so that "
                    f"reading them is slower: {str(error).strip().splitlines()[0]}",
                    stacklevel=2,
                )
        return model(**inputs)

    return forward_of_prompts
