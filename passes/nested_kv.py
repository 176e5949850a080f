"""Rotation of queries and keys, and the writes into the nested cache, become one call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch.fx import Graph, Node

from nestq.passes.graph_edits import erase_unused, insert_call
from nestq.passes.graph_nodes import (
    argument,
    calls,
    calls_operator,
    example,
    operands,
    operator_arguments,
    same_sizes,
)
from nestq.passes.graph_pass import GraphPass
from nestq.passes.graph_writes import may_write
from nestq.reference.hadamard import hadamard_block

_LAST = (-1, 3)  # the last dimension of states [B, H, n, D]
_PLANES = ("base", "refinement", "scale")


class NestedKV(GraphPass):
    """Rotary embedding and two ``kv_append`` in front of attention become one ``rotate_append``.

    Before::

        cos_1, sin_1 = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated = query * cos_1 + torch.cat((-query[..., half:], query[..., :half]), -1) * sin_1
        rotated_key = key * cos_1 + torch.cat((-key[..., half:], key[..., :half]), -1) * sin_1
        kv_append(rotated_key, positions, *key_planes)
        kv_append(value, positions, *value_planes)
        out = nested_attention(rotated, positions, *key_planes, *value_planes, scaling, ...)

    After::

        rotated = rotate_append(
            query, key, value, cos, sin, positions, *key_planes, *value_planes
        )
        out = nested_attention(rotated, positions, *key_planes, *value_planes, scaling, ...)

    Rotated queries and keys may both be transformed by ``hadamard`` besides, as for a cache that
    stores keys so; then the last argument says so.

    The call stands right in front of attention. So nothing else may stand between the writes and
    attention, and nothing may be written after the rotations have read their inputs. Left alone are
    layers that rotate only a part of a head or transform one of a size that is no power of two,
    and rotated queries or keys with another user.
    """

    name = "nested_kv"

    def __call__(self, graph: Graph) -> int:
        attentions = [node for node in graph.nodes if calls_operator(node, "nested_attention")]
        return sum(_rewrite(attention) for attention in attentions)


def _rewrite(attention: Node) -> int:
    """Put one ``rotate_append`` in front of attention: 1 if that is possible, else 0."""
    read = operator_arguments(attention)
    keys, values = (_append(attention, read, name) for name in ("key", "value"))
    if keys is None or values is None:
        return 0
    query, key = read["query"], operator_arguments(keys)["states"]
    if set(query.users) != {attention} or set(key.users) != {keys}:
        return 0
    transformed = calls_operator(query, "hadamard"), calls_operator(key, "hadamard")
    if any(transformed) and not (all(transformed) and _whole_block(query)):
        return 0
    inner_query, inner_key = (_transformed(node) for node in (query, key))
    if inner_query is None or inner_key is None:
        return 0
    rotated_query, rotated_key = _rotation(inner_query), _rotation(inner_key)
    if rotated_query is None or rotated_key is None:
        return 0
    arguments = _arguments(rotated_query, rotated_key, keys, values)
    rotations = {query, key, *rotated_query.nodes, *rotated_key.nodes}
    if arguments is None or not _can_move(rotations, {keys, values}, attention):
        return 0
    transform = (True,) if all(transformed) else ()
    out = insert_call(attention, torch.ops.nestq.rotate_append, *arguments, *transform)
    attention.replace_input_with(query, out)
    for append in (keys, values):
        attention.graph.erase_node(append)
    erase_unused([query, key])
    return 1


def _transformed(node: Node) -> Node | None:
    """What a node transforms by ``hadamard``, the node if it does not; None if others read it."""
    if not calls_operator(node, "hadamard"):
        return node
    inner = operator_arguments(node)["x"]
    return inner if set(inner.users) == {node} else None


def _whole_block(node: Node) -> bool:
    """Whether a head is transformed as one vector, as the fused kernel does it."""
    value = example(node)
    size = None if value is None else value.shape[-1]
    return isinstance(size, int) and hadamard_block(size) == size


def _arguments(
    query: "_Rotation", key: "_Rotation", keys: Node, values: Node
) -> tuple[Node, ...] | None:
    """Arguments of ``rotate_append`` in place of two rotations and two ``kv_append``."""
    written, values_written = operator_arguments(keys), operator_arguments(values)
    positions = written["positions"]
    if (query.cos, query.sin) != (key.cos, key.sin) or positions is not values_written["positions"]:
        return None
    states = query.states, key.states, values_written["states"]
    planes = [one[name] for one in (written, values_written) for name in _PLANES]
    base, value_base = example(written["base"]), example(values_written["base"])
    if len(set(planes)) != len(planes) or base is None or value_base is None:
        return None
    kinds = [(one.dtype, one.device) for one in (base, value_base)]
    if kinds[0] != kinds[1] or not _alike(base.shape, value_base.shape):
        return None
    if not _fit(*states, query.cos, query.sin):
        return None
    return *states, query.cos, query.sin, positions, *planes


def _append(attention: Node, read: dict[str, Any], name: str) -> Node | None:
    """The last ``kv_append`` in front of attention into the keys, or values, that it reads."""
    base = read[f"{name}_base"]
    appends = [
        node
        for node in base.users
        if node < attention
        and calls_operator(node, "kv_append")
        and operator_arguments(node)["base"] is base
    ]
    if not appends:
        return None
    append = max(appends)
    written = operator_arguments(append)
    refinement = read[f"{name}_refinement"]
    if written["scale"] is not read[f"{name}_scale"]:
        return None
    return append if refinement in (None, written["refinement"]) else None


@dataclass(frozen=True)
class _Rotation:
    """``states * cos + rotate_half(states) * sin``.

    Attributes:
        states: ``[B, H, n, D]``.
        cos: ``[B or 1, n, D]``.
        sin: the same.
        nodes: all that read the states, and the sum.
    """

    states: Node
    cos: Node
    sin: Node
    nodes: list[Node]


def _rotation(node: Any) -> _Rotation | None:
    """How a node is rotated; None if it is not."""
    around = []
    whole = _without_empty_end(node)
    if whole is not node:
        around.append(node)
    for kept, turned in _both_orders(whole, "add"):
        for half, of_half in _both_orders(turned, "mul"):
            found, sin = _rotate_half(half), _angle(of_half)
            for states, of_states in _both_orders(kept, "mul"):
                cos = _angle(of_states)
                if found is None or states is not found[0] or cos is None or sin is None:
                    continue
                return _Rotation(states, cos, sin, [*around, whole, kept, turned, *found[1]])
    return None


def _both_orders(node: Node, name: str) -> Iterator[tuple[Node, ...]]:
    """The operands of a commutative function, in both orders; none if a node is not that."""
    return permutations(operands(node, name) or (), 2)


def _without_empty_end(node: Any) -> Any:
    """``x`` for ``torch.cat((x, y), -1)`` where y, which is not to be rotated, has no columns."""
    parts = _concatenated(node)
    if parts is None:
        return node
    end = example(parts[1])
    return parts[0] if end is not None and same_sizes(end.shape[-1:], (0,)) else node


def _rotate_half(node: Node) -> tuple[Node, list[Node]] | None:
    """``x`` for ``torch.cat((-x2, x1), -1)``, halves of x, and the nodes in between."""
    parts = _concatenated(node)
    if parts is None or not calls(parts[0], "neg"):
        return None
    second, first = _half(argument(parts[0], 0, "input")), _half(parts[1])
    if second is None or first is None or second[0] is not first[0]:
        return None
    if (first[1], second[1]) != (0, 1):
        return None
    return first[0], [node, parts[0], *first[2], *second[2]]


def _concatenated(node: Any) -> tuple[Node, Node] | None:
    """The two parts that a node concatenates along the last dimension."""
    if not calls(node, "cat") or argument(node, 1, "dim", 0) not in _LAST:
        return None
    parts = argument(node, 0, "tensors")
    if not isinstance(parts, (tuple, list)) or len(parts) != 2:
        return None
    return parts[0], parts[1]


def _half(node: Any) -> tuple[Node, int, list[Node]] | None:
    """The source of a half, which half it is, and the nodes that take it; None if it is none."""
    if not calls(node, "getitem"):
        return None
    source, index = node.args
    if index in (0, 1) and calls(source, "chunk"):
        halves = argument(source, 1, "chunks") == 2 and argument(source, 2, "dim", 0) in _LAST
        return (argument(source, 0, "input"), index, [node, source]) if halves else None
    states = example(source)
    if states is None or not isinstance(index, tuple) or not index:
        return None
    if index[:-1] not in ((Ellipsis,), (slice(None),) * (states.dim() - 1)):
        return None
    size, piece = states.shape[-1], index[-1]
    if not isinstance(size, int) or not isinstance(piece, slice) or piece.step not in (None, 1):
        return None
    if piece.start in (None, 0) and piece.stop == size // 2:
        return source, 0, [node]
    if piece.start == size // 2 and piece.stop in (None, size):
        return source, 1, [node]
    return None


def _angle(node: Node) -> Node | None:
    """Cosines or sines ``[B or 1, n, D]`` of which a node makes ``[B or 1, 1, n, D]``."""
    if calls(node, "unsqueeze") and argument(node, 1, "dim") in (1, -3):
        return argument(node, 0, "input")
    if calls(node, "getitem") and node.args[1] == (slice(None), None):
        return node.args[0]  # type: ignore[return-value]
    return None


def _fit(query: Node, key: Node, value: Node, cos: Node, sin: Node) -> bool:
    """Whether ``rotate_append`` takes such tensors."""
    tensors = [example(node) for node in (query, key, value, cos, sin)]
    if any(one is None or not same_sizes(one.stride()[-1:], (1,)) for one in tensors):
        return False
    q, k, v, c, s = (one for one in tensors if one is not None)
    if (q.dim(), k.dim(), c.dim()) != (4, 4, 3) or {q.dtype, q.device} != {c.dtype, c.device}:
        return False
    if {k.dtype, v.dtype, c.dtype, s.dtype} != {q.dtype} or not _alike(c.shape, s.shape):
        return False
    rows = any(_alike(c.shape[:1], batch) for batch in ((1,), q.shape[:1]))
    whole = _alike((k.shape[0], *k.shape[2:]), (q.shape[0], *q.shape[2:]))
    return rows and whole and _alike(k.shape, v.shape) and _alike(c.shape[1:], q.shape[2:])


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal in the call that is traced.

    Batches and capacities of inputs are symbols of their own, which nothing says to be equal. The
    operator looks at them in each call.
    """
    return [_hint(size) for size in one] == [_hint(size) for size in other]


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _can_move(rotations: set[Node], appends: set[Node], attention: Node) -> bool:
    """Whether rotations and writes may be done right in front of attention."""
    node, first_append = min({*rotations, *appends}), min(appends)
    while node is not attention:
        in_between = node not in rotations and node not in appends
        if in_between and (node > first_append or may_write(node)):
            return False
        node = node.next
    return True
