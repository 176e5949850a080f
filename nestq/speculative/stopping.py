"""What ends a sequence besides its own block: transformers' stopping criteria."""

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

# Criteria that may be asked about the host's copy of the ids: they hold no tensor but their own.
_ON_HOST = (MaxTimeCriteria, StopStringCriteria)


class Stopping:
    """Transformers' stopping criteria, divided by who can apply them.

    Maximum length and end-of-sequence tokens are left to the device
    (:meth:`nestq.speculative.state.DecodingState.keep`). Others are called as in one-by-one
    decoding: on the ids of one row, after each of its tokens, with ``scores=None``. Stop strings
    and the maximum time are looked for in the host's copy of the ids, so that nothing waits for
    the device. Criteria of other types may compare ids with tensors of their own: they are given
    ids on the device.

    Args:
        criteria: of the call.
        hidden: columns, from 0 on, that they do not see: of a prompt of embeddings alone.

    Attributes:
        max_length: columns that a sequence may have, prompt and padding included.
        eos: end-of-sequence tokens.
        others: the criteria that the host must ask after each round.
        on_host: whether the host's copy of the ids does for all of them.
    """

    def __init__(self, criteria: StoppingCriteriaList, hidden: int = 0) -> None:
        self._hidden = hidden
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        if not lengths:
            raise ValueError("stopping_criteria must hold a MaxLengthCriteria, got none")
        self.max_length = min(lengths) + hidden
        eos = [torch.atleast_1d(c.eos_token_id) for c in criteria if type(c) is EosTokenCriteria]
        self.eos: list[int] = torch.cat(eos).tolist() if eos else []
        known = (MaxLengthCriteria, EosTokenCriteria)
        self.others = StoppingCriteriaList([c for c in criteria if type(c) not in known])
        self.on_host = all(type(c) in _ON_HOST for c in self.others)

    @property
    def rows_end_together(self) -> bool:
        """Whether only the maximum length ends a sequence."""
        return not self.eos and not self.others

    def first_end(self, ids: Tensor, first: int, last: int) -> int | None:
        """The first column at which another criterion ends a sequence, or None.

        Args:
            ids: int64 ``[1, columns]``, one row.
            first: column of its first new token.
            last: column of its last known token.
        """
        for column in range(first, last + 1):
            if self.others(ids[:, self._hidden : column + 1], None):  # type: ignore[arg-type]
                return column
        return None
