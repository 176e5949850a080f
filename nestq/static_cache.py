"""Models that are not from transformers: their own buffers of keys and values become planes."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from nestq import ops as _ops  # noqa: F401 (registers the operators)
from nestq.argument_checks import check_type, first_in_training
from nestq.kv_policy import KVPolicy
from nestq.reference.kv import quantize_kv
from nestq.view import current_view

# Kinds of a policy that do not depend on the length of a context, which such a module does not say.
KINDS = ("kv8", "kv4", "recent")
Example = Sequence[Any] | Mapping[str, Any]


def nest_static_cache_(
    module: nn.Module, examples: Sequence[Example], *, kv: str | KVPolicy = "kv8/kv8"
) -> list[str]:
    """Replace the buffers of keys and values of a small GPT implementation by nested planes.

    For a module whose attention layers own a buffer ``[B, H_kv, S, D]`` or ``[B, S, H_kv, D]`` for
    keys and one for values, write new ones at the positions of the call, and read them by
    ``scaled_dot_product_attention`` with a mask that lets each position see those up to its own::

        self.keys.index_copy_(2, positions, k)      # or self.keys[:, :, positions] = k
        self.values[:, :, start : start + n] = v    # or index_put_
        mask = torch.arange(S) <= positions[:, None]
        out = F.scaled_dot_product_attention(q, self.keys.repeat_interleave(4, 1), ..., mask)

    The forward pass is captured by Dynamo for each example. In the graphs, updates become
    ``nestq::kv_append`` and attention ``nestq::nested_attention``; the buffer ``x`` becomes the
    buffers ``x_base``, ``x_refinement`` and ``x_scale``, with what it held. From then on the module
    runs the graphs: in the view ``"draft"`` what the policy says is read, in ``"target"`` all.
    Compile it afterwards; nest its linears before or after, for example by torchao's ``quantize_``.

    A graph serves all calls whose sizes and ints its code treats alike; a batch is fixed, and sizes
    of 1, as of a decoding step, need an example of their own. Attributes that are no tensors are as
    they were in the examples. There are no gradients, and positions are consecutive.

    Args:
        module: in evaluation mode. Its forward pass takes tensors, ints from 0 on and constants, by
            position or by name.
        examples: calls, each a sequence of arguments or a dict of them by name: of a prompt and of
            a step, for example. They are not run.
        kv: what drafts read: ``"kv8/kv8"``, ``"kv4/kv8"`` or ``"recent(n)"``.

    Returns:
        Names of the buffers that were replaced.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no buffer is a cache, or one is used in another way: the message names it and
            says what was found; or the module is in training mode.
        TorchDynamoException: the module cannot be captured whole.

        The module is then unchanged.
    """
    check_type("module", module, nn.Module, "a torch.nn.Module")
    policy = KVPolicy.parse(kv)
    if policy.kind not in KINDS or policy != KVPolicy(policy.kind, policy.entries):
        raise ValueError(f"kv must be 'kv8/kv8', 'kv4/kv8' or 'recent(n)' here, got {kv!r}")
    if isinstance(module, NestedStaticCache):
        raise ValueError("module must have dense buffers, got one whose caches are nested")
    training = first_in_training(module)
    if training is not None:
        raise ValueError(f"module must be in evaluation mode, got {training} in training")
    parameters = _parameters(module)
    calls = [_bound(parameters, args, kwargs) for args, kwargs in _checked(examples)]

    # Capturing takes Dynamo, which most processes never import.
    from nestq.passes.captured_call import CapturedCall, getattr_path
    from nestq.passes.static_cache import StaticCaches
    from nestq.passes.static_cache_inputs import CallInputs
    from nestq.passes.static_cache_rewrite import as_function, reading, rewrite

    names = [parameter.name for parameter in parameters]
    captured: list[CapturedCall] = []
    found: list[list[Any]] = []
    waiting = list(calls)
    for values in waiting:
        if any(call.fits(values) for call in captured):
            continue
        captured.append(CapturedCall(module, names, values))
        caches = StaticCaches(CallInputs(module, captured[-1]))
        found.append(caches.match())
        if found[-1]:
            waiting += caches.at_the_ends(found[-1][0])
    updates = {one.buffer: one for read in found[0] for one in (read.keys, read.values)}
    if not updates:
        raise ValueError(
            f"module must have buffers [B, H, S, D] or [B, S, H, D] that it updates in place, and "
            f"{type(module).__name__} has none in its first example"
        )
    for name in updates:
        _check_buffer(module, name)
    for index, reads in enumerate(found):
        others = {one.buffer: one for read in reads for one in (read.keys, read.values)}
        for name in updates.keys() ^ others.keys():
            raise ValueError(f"examples must all use the same caches, and {name!r} is not in all")
        for name, other in others.items():
            if other.layout != updates[name].layout:
                raise ValueError(f"examples[{index}] has another layout of {name!r} than the first")
    planes: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, update in updates.items():
            dense = update.canonical(getattr_path(module, name))
            for kind, plane in zip(_planes(name), quantize_kv(dense), strict=True):
                planes[kind] = plane.contiguous()
    programs = []
    draft_read = policy.read("draft", None)
    for call, reads in zip(captured, found, strict=True):
        rewrite(call, reads, planes)
        views = {"draft": reading(call.graph, draft_read), "target": call.graph}
        graphs = {view: as_function(graph) for view, graph in views.items()}
        variable = list(call.inputs)
        programs.append(_Program(call.conditions, variable, call.output_spec, graphs))
    _install(module, list(updates), planes, _StaticCache(parameters, programs))
    return list(updates)


@dataclass
class _Program:
    """What computes calls that are like an example.

    Attributes:
        conditions: of the values of a call (``nestq.passes.captured_call.Conditions``).
        inputs: indices of the values that the graphs are given.
        output_spec: how the output is put together.
        graphs: for each view, and the names of the attributes that it is given first.
    """

    conditions: Any
    inputs: list[int]
    output_spec: Any
    graphs: dict[str, tuple[GraphModule, list[str]]]


@dataclass
class _StaticCache:
    """What a module computes with, once its caches are nested."""

    parameters: list[inspect.Parameter]
    programs: list[_Program]


class NestedStaticCache(nn.Module):
    """What the class of a module with nested caches derives from, besides the class it had."""

    _static_cache: _StaticCache

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph that fits the arguments, in the view of the caller."""
        if self.training:
            raise ValueError("a module with nested caches computes in evaluation mode only")
        values = _bound(self._static_cache.parameters, args, kwargs)
        for program in self._static_cache.programs:
            if program.conditions.hold(values):
                return _run(self, program, values)
        raise ValueError(
            "no example that nest_static_cache_ was given is like this call, with "
            f"{[_described(value) for value in values]}: give an example of such sizes and "
            "constants, too"
        )


def _run(module: nn.Module, program: _Program, values: Sequence[Any]) -> Any:
    graph, names = program.graphs[current_view()]
    attributes = []
    for name in names:
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part)
        attributes.append(value)
    with torch.no_grad():
        outputs = graph(*attributes, *[_as_input(values[index]) for index in program.inputs])
    return pytree.tree_unflatten(list(outputs), program.output_spec)


def _as_input(value: Any) -> Tensor:
    """A tensor itself, and for an int one whose size stands for it."""
    return value if isinstance(value, Tensor) else torch.empty(value + 2)


def _described(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """Of the forward pass; each can be given by position."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    for parameter in parameters:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise ValueError(
                f"module must have a forward pass with parameters by position, got {parameter}"
            )
    return parameters


def _checked(examples: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    if not isinstance(examples, (list, tuple)) or not examples:
        raise ValueError(f"examples must be a list of at least one call, got {examples!r:.100}")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for example in examples:
        if isinstance(example, Mapping):
            calls.append(((), dict(example)))
        elif isinstance(example, (list, tuple)):
            calls.append((tuple(example), {}))
        else:
            raise TypeError(
                "examples must hold tuples of arguments or dicts of them, "
                f"got {type(example).__name__}"
            )
    return calls


def _bound(
    parameters: Sequence[inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """A value for each parameter."""
    values = list(args)
    used = 0
    for parameter in parameters[len(args) :]:
        if parameter.name in kwargs:
            values.append(kwargs[parameter.name])
            used += 1
        elif parameter.default is not inspect.Parameter.empty:
            values.append(parameter.default)
        else:
            raise TypeError(f"the call misses the argument {parameter.name!r}")
    if len(args) > len(parameters) or used != len(kwargs):
        names = [parameter.name for parameter in parameters]
        raise TypeError(f"the call has other arguments than {names}, or one of them twice")
    return values


def _check_buffer(module: nn.Module, name: str) -> None:
    """Refuse what is no buffer of one module alone."""
    owner, attribute = _owner(module, name)
    if attribute not in owner._buffers:
        raise ValueError(f"{name!r} must be a registered buffer, to be nested as a cache")
    tensor = owner._buffers[attribute]
    for other, same in module.named_buffers(remove_duplicate=False):
        if same is tensor and other != name:
            raise ValueError(f"{name!r} must be a buffer of its own, and {other!r} is the same")
    for plane in _planes(attribute):
        if hasattr(owner, plane):
            raise ValueError(f"{name!r} cannot be nested: there is an attribute {plane!r} already")


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _planes(name: str) -> list[str]:
    return [f"{name}_{kind}" for kind in ("base", "refinement", "scale")]


def _install(
    module: nn.Module, names: Sequence[str], planes: Mapping[str, Tensor], cache: _StaticCache
) -> None:
    for name in names:
        owner, attribute = _owner(module, name)
        persistent = attribute not in owner._non_persistent_buffers_set
        delattr(owner, attribute)
        for plane, path in zip(_planes(attribute), _planes(name), strict=True):
            owner.register_buffer(plane, planes[path], persistent)
    kind = type(module)
    module._static_cache = cache  # type: ignore[assignment]
    module.__class__ = type(f"Nested{kind.__name__}", (NestedStaticCache, kind), {})
