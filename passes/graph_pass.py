"""What every pass over a graph is."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch.fx import Graph


class GraphPass(ABC):
    """A rewriting of the graph that Dynamo hands to Inductor, before autograd and lowering.

    Nodes call PyTorch's functions and methods and ``torch.ops.nestq`` as the model's code does, in
    its order, in place where the code is; ``node.meta["example_value"]`` has dtypes and shapes. A
    pass keeps the graph valid and what it computes the same. The docstring of each shows the graph
    before and after.

    Attributes:
        name: for logs and for switching the pass off; that of the module.
    """

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, graph: Graph) -> int:
        """Rewrite the graph in place.

        Returns:
            Number of matches, each of which was rewritten.
        """
