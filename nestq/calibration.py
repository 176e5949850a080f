"""Run calibration text through a model, one decoder layer at a time.

Only one layer's activations exist at a time, and only one layer's weights need be on the compute
device, so that a model larger than the device's memory can be calibrated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from nestq.architectures import HEAD, Architecture
from nestq.data import token_windows, tokenize_texts
from nestq.gptq import Hessian
from nestq.reference.linear import quantize_activation

# names, linears and Hessian [K, K] of one group -> the weight that each linear computes with from
# then on, or an empty list to leave them as they are.
Process = Callable[[Sequence[str], Sequence[nn.Linear], Tensor], Sequence[Tensor]]


def calibration_windows(
    calibration: Any, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, length: int
) -> Tensor:
    """Rows of token ids ``[n, length]`` from what a user gave as calibration.

    Args:
        calibration: texts or chats, 1-D or 2-D int64 token tensors, lists of token ids, or a
            ``datasets`` dataset with a column ``text``, ``messages`` or ``input_ids``; a column
            ``attention_mask`` beside the last says which ids are pads, and those are left out.
        tokenizer: for texts and chats.
        vocab_size: ids must be below it.
        length: tokens a row, at most; less if the calibration is shorter.

    Raises:
        TypeError, ValueError: what came cannot be used; says what is expected.
    """
    if isinstance(calibration, (str, bytes)):
        raise TypeError("calibration must be a list of texts or of token ids, got a single string")
    if isinstance(calibration, Mapping) and not hasattr(calibration, "column_names"):
        raise TypeError(
            "calibration must be a list of texts or of token ids, or a dataset, "
            f"got {type(calibration).__name__} with keys {list(calibration)}"
        )
    items = _dataset_column(calibration)
    if isinstance(items, Tensor):
        if items.dim() not in (1, 2):
            raise ValueError(f"calibration must be a 1-D or 2-D tensor, got {tuple(items.shape)}")
        items = list(items if items.dim() == 2 else [items])
    if not isinstance(items, Iterable):
        raise TypeError(
            "calibration must be a list of texts or of token ids, or a dataset, "
            f"got {type(items).__name__}"
        )
    items = list(items)
    if not items:
        raise ValueError("calibration is empty; pass None to round to nearest without it")
    if _is_token_ids(items[0]):
        sequences = [_token_ids(item, index) for index, item in enumerate(items)]
        sequences = _without_pads(sequences, calibration)
    elif not isinstance(items[0], (str, list, tuple)) or items[0] in ([], ()):
        raise TypeError(
            "calibration must hold texts, chats, or lists or tensors of token ids, "
            f"got {items[0]!r} first"
        )
    elif tokenizer is None:
        raise ValueError("calibration holds texts: pass tokenizer=, or pass token ids")
    else:
        sequences = tokenize_texts(tokenizer, items)
    largest = max(max(sequence) for sequence in sequences)
    smallest = min(min(sequence) for sequence in sequences)
    if not 0 <= smallest <= largest < vocab_size:
        raise ValueError(
            f"calibration has token ids from {smallest} to {largest}, "
            f"the model's vocabulary has {vocab_size}"
        )
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return token_windows(sequences, min(length, sum(map(len, sequences))), eos)


def _dataset_column(calibration: Any) -> Any:
    names = getattr(calibration, "column_names", None)
    if names is None:
        return calibration
    for name in ("input_ids", "messages", "text"):
        if name in names:
            return calibration[name]
    raise ValueError(
        f"calibration: the dataset has columns {names}, expected 'text', 'messages' or 'input_ids'"
    )


def _is_token_ids(item: Any) -> bool:
    return isinstance(item, Tensor) or (
        isinstance(item, (list, tuple)) and len(item) > 0 and isinstance(item[0], Integral)
    )


def _token_ids(item: Any, index: int) -> list[int]:
    if not _is_token_ids(item):
        raise TypeError(f"calibration[{index}] must hold token ids as the first does, got {item!r}")
    tensor = torch.as_tensor(item)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.numel() == 0:
        raise ValueError(
            f"calibration[{index}] must hold integer token ids, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor.flatten().tolist()


def _without_pads(sequences: list[list[int]], calibration: Any) -> list[list[int]]:
    """What the dataset's attention masks keep, if it has any."""
    if "attention_mask" not in (getattr(calibration, "column_names", None) or ()):
        return sequences
    kept = []
    for index, (ids, mask) in enumerate(zip(sequences, calibration["attention_mask"], strict=True)):
        if len(mask) != len(ids):
            raise ValueError(
                f"calibration[{index}] must have an attention_mask as long as its input_ids, "
                f"got {len(mask)} and {len(ids)}"
            )
        kept.append([token for token, keep in zip(ids, mask, strict=True) if keep])
    kept = [ids for ids in kept if ids]
    if not kept:
        raise ValueError("calibration must have tokens, got an attention_mask that hides them all")
    return kept


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Have all of a model in evaluation mode for a while: no dropout, no checkpointing."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else for a while."""
    own = module.__dict__.get("forward")  # of a library that wraps forward passes
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


class _LastLayerReachedError(Exception):
    """Ends a forward pass in front of the last decoder layer."""


class LayerInputs:
    """Inputs of a decoder layer for all calibration rows, advanced from layer to layer.

    Attributes:
        hidden: a tensor ``[batch, length, hidden_size]`` for each batch, on the compute device.
        kwargs: for each batch the keyword arguments of every layer; where layers attend
            differently, each has a mask of its own.
    """

    def __init__(
        self, architecture: Architecture, windows: Tensor, batch_size: int, device: torch.device
    ) -> None:
        self.device = device
        self.hidden: list[Tensor] = []
        self.kwargs: list[list[dict[str, Any]]] = []
        home = architecture.embedding.weight.device

        def record(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            calls = self.kwargs[-1]
            if not calls:
                self.hidden.append(hidden_states.to(device))
            calls.append(kwargs)
            if len(calls) == len(architecture.layers):
                raise _LastLayerReachedError
            return hidden_states

        with torch.no_grad(), ExitStack() as stack:
            for layer in architecture.layers:
                stack.enter_context(replaced_forward(layer, record))
            for rows in windows.split(batch_size):
                self.kwargs.append([])
                with suppress(_LastLayerReachedError):
                    architecture.model(input_ids=rows.to(home), use_cache=False)

    def run(self, layer: nn.Module, index: int) -> list[Tensor]:
        """Outputs of decoder layer ``index`` for all batches."""
        outputs = []
        for hidden, calls in zip(self.hidden, self.kwargs, strict=True):
            output = layer(hidden, **_to_device(calls[index], self.device))
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    return value


def fake_quantize(x: Tensor, bits: int = 8) -> Tensor:
    """``x`` rounded to what activations of 4 or 8 bits can hold, in its own dtype; 16 leave it."""
    if bits == 16:
        return x
    codes, scale = quantize_activation(x, bits)
    return (codes * scale).to(x.dtype)


@contextmanager
def rounded_inputs(linears: Sequence[nn.Linear], bits: int = 8) -> Iterator[None]:
    """Round the inputs of dense linears, as quantized ones do."""
    hooks = [
        linear.register_forward_pre_hook(lambda _, args: (fake_quantize(args[0], bits), *args[1:]))
        for linear in linears
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _observed(linear: nn.Linear, hessian: Hessian) -> Iterator[None]:
    hook = linear.register_forward_hook(lambda _, args, __: hessian.add(args[0]))
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def sweep_layers(
    architecture: Architecture,
    inputs: LayerInputs,
    process: Process,
    *,
    with_head: bool,
    description: str,
    progress: bool = True,
    activation_bits: int = 8,
) -> None:
    """Show ``process`` every group of linears with its Hessian, first layer to head.

    The inputs that a layer is observed with come out of the layers before it as ``process`` left
    them: each layer is calibrated on what it will really see, with activations of 4, 8 or 16
    bits. Weights return to where they were.
    """
    device = inputs.device
    layers = tqdm(architecture.layers, desc=description, unit="layer", disable=not progress)
    for index, layer in enumerate(layers):
        linears = [architecture.linear(index, name) for name in architecture.linear_names]
        with moved(layer, device):
            hessians = _observe_layer(architecture, index, inputs, activation_bits)
            replaced: dict[nn.Linear, Tensor] = {}
            for group, hessian in zip(architecture.linear_groups, hessians, strict=True):
                names = [f"{architecture.layer_name(index)}.{name}" for name in group]
                modules = [architecture.linear(index, name) for name in group]
                weights = process(names, modules, hessian.mean(names[0]))
                if weights:
                    replaced |= dict(zip(modules, weights, strict=True))
            with rounded_inputs(linears, activation_bits), _computing_with(replaced):
                inputs.hidden = inputs.run(layer, index)
    if with_head:
        hessian = Hessian(architecture.head.in_features, device)
        with moved(architecture.final_norm, device) as norm:
            for hidden in inputs.hidden:
                hessian.add(fake_quantize(norm(hidden), activation_bits))
        process([HEAD], [architecture.head], hessian.mean(HEAD))


@contextmanager
def moved(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Have a module, which lies on one device, on another for a while."""
    home = next(module.parameters()).device
    try:
        yield module.to(device)
    finally:
        module.to(home)


def _observe_layer(
    architecture: Architecture, index: int, inputs: LayerInputs, activation_bits: int
) -> list[Hessian]:
    """One Hessian for each group of linears; all linears of a group read one input."""
    linears = [architecture.linear(index, name) for name in architecture.linear_names]
    firsts = [architecture.linear(index, group[0]) for group in architecture.linear_groups]
    hessians = [Hessian(first.in_features, inputs.device) for first in firsts]
    with rounded_inputs(linears, activation_bits), ExitStack() as observers:
        for first, hessian in zip(firsts, hessians, strict=True):
            observers.enter_context(_observed(first, hessian))
        inputs.run(architecture.layers[index], index)
    return hessians


@contextmanager
def _computing_with(weights: dict[nn.Linear, Tensor]) -> Iterator[None]:
    """Let linears compute with other weights for a while."""
    originals = {linear: linear.weight for linear in weights}
    for linear, weight in weights.items():
        linear.weight = nn.Parameter(weight.to(originals[linear].dtype), requires_grad=False)
    try:
        yield
    finally:
        for linear, original in originals.items():
            linear.weight = original
