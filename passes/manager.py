"""Which passes run when Inductor compiles, in which order, and how they get there.

Inductor runs ``torch._inductor.config.pre_grad_custom_pass`` on each graph that Dynamo hands it.
``nest_view`` puts a :class:`PassManager` there, so that a plain ``torch.compile(model)`` finds it.
What a pass does can be seen with ``logging.getLogger("nestq.passes").setLevel(logging.INFO)``.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from nestq.passes.fuse_act_quant import FuseActQuant
from nestq.passes.graph_pass import GraphPass
from nestq.passes.merge_linears import MergeLinears
from nestq.passes.nested_kv import NestedKV

log = logging.getLogger("nestq.passes")

# A norm that three linears read has a single reader only once they are merged. What happens to
# queries, keys and values after that does not depend on where they come from.
PASSES: tuple[GraphPass, ...] = (MergeLinears(), FuseActQuant(), NestedKV())

_disabled: ContextVar[frozenset[str]] = ContextVar("disabled", default=frozenset())


@contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Compile without passes of these names, or without any if no name is given.

    What is compiled already stays as it is: call ``torch.compiler.reset()`` to compile again.

    Raises:
        ValueError: there is no pass of that name.
    """
    known = {one.name for one in PASSES}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ValueError(f"names must be some of {sorted(known)}, got {unknown}")
    token = _disabled.set(_disabled.get() | (set(names) or known))
    try:
        yield
    finally:
        _disabled.reset(token)


def run_passes(graph: Graph) -> dict[str, int]:
    """Run the passes that are enabled on a graph, in place.

    Returns:
        Number of matches of each; nothing for a graph without ``nestq`` operators, which is left
        as it is.
    """
    if not any(_is_ours(node.target) for node in graph.nodes):
        return {}
    matches = {one.name: one(graph) for one in PASSES if one.name not in _disabled.get()}
    if matches:
        log.info("%s", ", ".join(f"{name}: {count}" for name, count in matches.items()))
    return matches


def _is_ours(target: Any) -> bool:
    return getattr(target, "__module__", None) == "torch._ops.nestq"


class PassManager(CustomGraphPass):
    """Inductor's pass before autograd: first those that the user had set there, then ours."""

    def __init__(self, users: Any = None) -> None:
        self.users = users

    def __call__(self, graph: Graph) -> None:
        for one in self._passes_of_user():
            one(graph)
        run_passes(graph)

    def uuid(self) -> Any:
        """What compiled graphs in torch's caches depend on; None, for no caching, is the user's."""
        theirs = [
            one.uuid() if isinstance(one, CustomGraphPass) else None
            for one in self._passes_of_user()
        ]
        if any(not one for one in theirs):
            return None
        return _version(), tuple(sorted(_disabled.get())), tuple(theirs)

    def _passes_of_user(self) -> tuple[Any, ...]:
        if self.users is None:
            return ()
        return tuple(self.users) if isinstance(self.users, (list, tuple)) else (self.users,)


@cache
def _version() -> str:
    """Hash of all passes and of what they call."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    for operator in (torch.ops.nestq.fused_linear, torch.ops.nestq.rotate_append):
        digest.update(str(operator.default._schema).encode())
    return digest.hexdigest()


def install() -> None:
    """Let Inductor run our passes in this thread, after those that are set there now.

    It costs a look where they are installed already.
    """
    users = config.pre_grad_custom_pass
    if isinstance(users, PassManager):
        return
    if isinstance(users, (list, tuple)) and any(isinstance(one, PassManager) for one in users):
        return
    config.pre_grad_custom_pass = PassManager(users)
