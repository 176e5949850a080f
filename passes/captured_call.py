"""A module's forward pass as a graph of PyTorch calls that is captured ahead of time.

Dynamo makes it, without running anything. Sizes of inputs and ints that are arguments stay variable
where the module's code allows it, and what it assumed of them is kept as a condition.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen
from torch.utils._sympy.printers import PythonPrinter

from nestq.passes.graph_values import is_size

# An int argument comes into the graph as a size, which stays variable. Sizes of 0 and 1 do not.
_LEAST_SIZE = 2
_CONSTANTS = (bool, float, str, type(None))
# What Dynamo calls an input.
_INPUT = re.compile(r"L\['tensors'\]\[(\d+)\]")


class CapturedCall:
    """A graph of a module for inputs like some examples.

    Args:
        module: in evaluation mode; nothing in it is changed.
        names: of the parameters of its forward pass.
        values: an example for each: a tensor, an int from 0 on, or a constant.

    Attributes:
        graph: calls on placeholders, first one for each attribute of the module that is read, then
            one for each tensor or int of the values; its output is a flat list, and
            ``node.meta["example_value"]`` has dtypes and shapes.
        attributes: the placeholders of attributes, and their qualified names, which are in
            ``node.meta["attribute"]``, too.
        inputs: the placeholder of each value that has one, by the index of the value.
        names: as given.
        example: the values.
        conditions: of values for which the graph is right.
        output_spec: how the flat output is put together (``torch.utils._pytree``).

    Raises:
        TypeError: a value is none of these.
        TorchDynamoException: the module cannot be captured whole.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], values: Sequence[Any]) -> None:
        self.names, self.example = list(names), list(values)
        variable = [i for i, value in enumerate(values) if _is_variable(names[i], value)]
        caller = _Caller(module, values, variable)
        tensors = [self._static_batch(as_tensor(values[i])) for i in variable]
        # Equal sizes of an example may differ in other calls.
        shapes: Any = torch.fx.experimental._config
        apart = shapes.patch(use_duck_shape=False)
        with torch.no_grad(), apart:
            exported, _ = torch._dynamo.export(
                caller, aten_graph=False, tracing_mode="symbolic", assume_static_by_default=False
            )(*tensors)
        self.graph: Graph = exported.graph
        codegen: Any = self.graph._codegen
        self.output_spec = codegen.pytree_info.out_spec
        self.graph.set_codegen(CodeGen())
        for node in reversed(self.graph.nodes):
            if is_size(node) and not node.users:
                self.graph.erase_node(node)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.inputs: dict[int, Node] = dict(zip(variable, placeholders, strict=True))
        self.fake_mode: Any = next(
            node.meta["example_value"].fake_mode
            for node in placeholders
            if isinstance(node.meta.get("example_value"), Tensor)
        )
        self.attributes: dict[Node, str] = {}
        origins = exported.meta["dynamo_flat_name_to_original_fqn"]
        self._lift_attributes(module, {k: v.removeprefix("module.") for k, v in origins.items()})
        self.conditions = Conditions([_kind(value) for value in values], self._of_shapes())

    def _lift_attributes(self, module: nn.Module, origins: dict[str, str]) -> None:
        """Make inputs of the attributes that the graph reads."""
        lifted: dict[str, Node] = {}
        for node in self.graph.find_nodes(op="get_attr"):
            name = origins[str(node.target)]
            if name not in lifted:
                lifted[name] = self.add_attribute(name, getattr_path(module, name))
            node.replace_all_uses_with(lifted[name])
            self.graph.erase_node(node)

    def add_attribute(self, name: str, tensor: Tensor) -> Node:
        """A new placeholder for a tensor of the module, behind those that are there."""
        last = [*self.attributes][-1:]
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_after(last[0]) if last else self.graph.inserting_before(first):
            node = self.graph.placeholder(name.replace(".", "_"))
        if type(tensor) in (Tensor, nn.Parameter):
            tensor = self.fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        node.meta.update(example_value=tensor, attribute=name)
        self.attributes[node] = name
        return node

    @staticmethod
    def _static_batch(tensor: Tensor) -> Tensor:
        """A copy whose first dimension, if there are more, is a batch, and does not vary."""
        tensor = tensor.detach().clone()
        if tensor.dim() > 1:
            torch._dynamo.mark_static(tensor, 0)
        return tensor

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether the graph computes what the module does for other values."""
        return self.conditions.hold(values)

    def _of_shapes(self) -> Callable[..., bool]:
        """A function of the shapes of all inputs: what Dynamo assumed of them."""
        names = [f"shape_{index}" for index in range(len(self.inputs))]
        printer: Any = PythonPrinter()
        symbols: dict[Any, str] = {}
        conditions: list[str] = []
        sizes: list[tuple[str, Any]] = []
        environment = self.fake_mode.shape_env
        # All inputs that the module's code looked at, also those that the graph does not read.
        for tracked in environment.tracked_fakes:
            name = tracked.source.name
            found = _INPUT.fullmatch(name() if callable(name) else name)
            if found is None or not isinstance(tracked.fake, Tensor):
                continue
            for dimension, size in enumerate(tracked.fake.shape):
                text = f"{names[int(found[1])]}[{dimension}]"
                expression = size.node.expr if isinstance(size, torch.SymInt) else size
                sizes.append((text, expression))
                if getattr(expression, "is_Symbol", False):
                    symbols.setdefault(expression, text)
        for text, expression in sizes:
            if symbols.get(expression) != text:
                conditions.append(f"{text} == {_printed(printer, expression)}")
        for symbol in symbols:
            bounds = environment.var_to_range[symbol]
            conditions.append(f"{symbol} >= {int(bounds.lower)}")
            if bounds.upper.is_Integer:
                conditions.append(f"{symbol} <= {int(bounds.upper)}")
        assumed = [environment.replace(guard.expr) for guard in environment.guards]
        conditions += [f"({_printed(printer, one)})" for one in assumed if one != True]  # noqa: E712
        unknown = set().union(*(one.free_symbols for one in assumed)) - symbols.keys()
        if unknown:
            raise NotImplementedError(
                f"the module's code branches on numbers in tensors: {unknown}"
            )
        body = [f"    {symbol} = {text}" for symbol, text in symbols.items()]
        body.append(f"    return {' and '.join(dict.fromkeys(conditions)) or 'True'}")
        source = "\n".join([f"def fits({', '.join(names)}):", *body])
        space: dict[str, Any] = {"math": math}
        exec(compile(source, "<conditions of a captured call>", "exec"), space)
        return space["fits"]


@dataclass(frozen=True)
class Conditions:
    """What values of a call must be like. Compiled code can ask it, too.

    Attributes:
        kinds: of each value a tuple: ``("tensor", dimensions, dtype, device)``, ``("int",)`` or
            ``("constant", value)``.
        of_shapes: a function of the shapes of all tensors, and of what stands for ints.
    """

    kinds: list[tuple[Any, ...]]
    of_shapes: Callable[..., bool]

    def hold(self, values: Sequence[Any]) -> bool:
        """Whether values are like that."""
        shapes: list[Any] = []
        for value, kind in zip(values, self.kinds, strict=True):
            if kind[0] == "constant":
                if type(value) is not type(kind[1]) or value != kind[1]:
                    return False
            elif kind[0] == "int":
                if isinstance(value, (Tensor, bool, float, str)) or value is None or value < 0:
                    return False
                shapes.append((value + _LEAST_SIZE,))
            else:
                if not isinstance(value, Tensor):
                    return False
                if (value.dim(), value.dtype, value.device) != kind[1:]:
                    return False
                shapes.append(value.shape)
        return self.of_shapes(*shapes)


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return "tensor", value.dim(), value.dtype, value.device
    return ("constant", value) if isinstance(value, _CONSTANTS) else ("int",)


class _Caller(nn.Module):
    """Calls a module with constants, and with ints that are sizes of tensors."""

    def __init__(self, module: nn.Module, values: Sequence[Any], variable: list[int]) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)
        self.values = [None if i in variable else value for i, value in enumerate(values)]
        self.variable = variable
        self.are_tensors = [isinstance(values[i], Tensor) for i in variable]

    def forward(self, *tensors: Tensor) -> Any:
        values = list(self.values)
        for index, is_tensor, tensor in zip(self.variable, self.are_tensors, tensors, strict=True):
            values[index] = tensor if is_tensor else tensor.shape[0] - _LEAST_SIZE
        return self.module(*values)


def as_tensor(value: Any) -> Tensor:
    """What stands for a value in a graph: a tensor itself, a size for an int."""
    return value if isinstance(value, Tensor) else torch.empty(value + _LEAST_SIZE)


def getattr_path(module: Any, path: str) -> Any:
    """An attribute of a module, or of what is inside it, by its qualified name."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _is_variable(name: str, value: Any) -> bool:
    """Whether a value has a place in the graph: a tensor or an int."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return True
    if isinstance(value, _CONSTANTS):
        return False
    raise TypeError(
        f"{name} must be a tensor, an int from 0 on, a bool, a float, a string or None in an "
        f"example, got {value!r:.100}"
    )


def _printed(printer: Any, expression: Any) -> str:
    return str(expression) if isinstance(expression, int) else printer.doprint(expression)
