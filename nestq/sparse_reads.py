"""Which cached positions a sparse draft attends to."""

from dataclasses import dataclass

from nestq.argument_checks import check_int

# Prompt tokens at the end whose queries vote, and positions that a vote is spread over.
SNAPKV_WINDOW = 32
SNAPKV_KERNEL = 7


@dataclass(frozen=True)
class StreamingLLM:
    """The first positions and the last ones (StreamingLLM, Xiao et al. 2023, 3.2).

    The query at position p attends to the positions ``j < sink`` and ``p - recent < j <= p``.
    Positions stay those of the whole text, while the paper counts them inside its cache.

    Attributes:
        sink: positions at the beginning, 0 for none.
        recent: positions at the end, the query's own included.
    """

    sink: int
    recent: int

    def __post_init__(self) -> None:
        check_int("sink", self.sink, 0)
        check_int("recent", self.recent, 1)

    def __str__(self) -> str:
        return f"streaming({self.sink},{self.recent})"


@dataclass(frozen=True)
class SnapKV:
    """The positions of the prompt that its end attends to most, and all after the prompt.

    See :mod:`nestq.snapkv_cache` for how they are chosen (SnapKV, Li et al. 2024, 4).

    Attributes:
        budget: positions of the prompt that each KV head keeps, the last 32 included.
    """

    budget: int

    def __post_init__(self) -> None:
        if isinstance(self.budget, int) and 0 < self.budget <= SNAPKV_WINDOW:
            raise ValueError(
                f"budget must be above {SNAPKV_WINDOW}, the prompt tokens at the end that are "
                f"kept in any case, got {self.budget}"
            )
        check_int("budget", self.budget, SNAPKV_WINDOW + 1)

    def __str__(self) -> str:
        return f"snapkv({self.budget})"


SparseRead = StreamingLLM | SnapKV
