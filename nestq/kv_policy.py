"""What the draft reads of a nested KV cache."""

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

from nestq.view import View

Kind = Literal["kv8", "kv4", "recent", "auto", "quantspec"]

_FORMS = "'kv8/kv8', 'kv4/kv8', 'recent(n)' or 'auto(n)' with n >= 1, or 'quantspec'"


class KVRead(NamedTuple):
    """What a forward pass reads: base and refinement, where ``recent`` is as in the operator."""

    refinement: bool
    recent: int = 0


WHOLE = KVRead(refinement=True)


@dataclass(frozen=True)
class KVPolicy:
    """What a draft reads of cached keys and values (BitNest paper A.2); a target reads all of it.

    Attributes:
        kind: ``"kv8"``, base and refinement; ``"kv4"``, the base; ``"recent"``, the refinement
            only in the last ``entries`` slots; ``"auto"``, KV8 up to a context of ``entries``
            positions and KV4 above; ``"quantspec"``, the base of a ``QuantSpecKVCache``.
        entries: n of ``recent(n)`` and ``auto(n)``, else 0.
    """

    kind: Kind
    entries: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if (self.entries > 0) != (self.kind in ("recent", "auto")):
            raise ValueError(
                "entries must be at least 1 for 'recent' and 'auto' and 0 for other kinds, "
                f"got {self.entries!r} for {self.kind!r}"
            )

    @classmethod
    def parse(cls, text: "str | KVPolicy") -> Self:
        """The policy that a string names; a policy is returned as it is.

        Args:
            text: ``"kv8/kv8"``, ``"kv4/kv8"``, ``"recent(256)"``, ``"auto(8192)"`` or
                ``"quantspec"``.
        """
        if isinstance(text, cls):
            return text
        match = re.fullmatch(r"(kv[48])/kv8|(quantspec)|(recent|auto)\(0*([1-9]\d*)\)", str(text))
        if match is None:
            raise ValueError(f"the KV policy must be {_FORMS}, got {text!r}")
        nested, quantspec, counted, entries = match.groups()
        kind: Any = nested or quantspec or counted
        return cls(kind, int(entries or 0))

    def read(self, view: View, context_length: int | None) -> KVRead:
        """What a view reads at a context length.

        Args:
            view: ``"draft"`` or ``"target"``.
            context_length: cached positions as the host knows them. Only ``auto`` looks at it.
        """
        if view == "target" or self.kind == "kv8":
            return WHOLE
        if self.kind == "recent":
            return KVRead(refinement=True, recent=self.entries)
        if self.kind in ("kv4", "quantspec"):
            return KVRead(refinement=False)
        if context_length is None:
            raise ValueError("context_length must be given for the policy auto(n), got None")
        return KVRead(refinement=context_length <= self.entries)
