"""What draft and target read of a KV cache."""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, get_args

from torch import nn
from torchao.utils import TorchAOBaseTensor

from nestq.sparse_reads import SnapKV, SparseRead, StreamingLLM
from nestq.view import View

Kind = Literal["kv8", "kv4", "base", "dense", "recent", "auto", "quantspec"]

_KINDS: dict[str, Kind] = {
    "kv8/kv8": "kv8",
    "kv4/kv8": "kv4",
    "kv4/kv4": "base",
    "16/16": "dense",
    "quantspec": "quantspec",
}
_STORED = re.compile(
    f"{'|'.join(_KINDS)}|" + r"(?P<counted>recent|auto)\(0*(?P<entries>[1-9]\d*)\)"
)
_SPARSE = re.compile(r"streaming\((\d+), ?(\d+)\)|snapkv\((\d+)\)")
_FORMS = (
    "'kv8/kv8', 'kv4/kv8', 'kv4/kv4', '16/16', 'recent(n)' or 'auto(n)' with n >= 1, each of "
    "which '+streaming(sink,recent)' or '+snapkv(budget)' may follow, or 'quantspec'"
)


class KVRead(NamedTuple):
    """What a forward pass reads of a cache.

    Attributes:
        refinement: of nested planes, whether the refinement is read besides the base.
        recent: with the refinement, the last slots in which it is read, as in the operator
            ``nestq::nested_attention``; 0 for all.
        sparse: the positions that are attended to; None for all.
    """

    refinement: bool
    recent: int = 0
    sparse: SparseRead | None = None

    @property
    def reach(self) -> tuple[int, int]:
        """``sink`` and ``local`` of the attention operators."""
        if isinstance(self.sparse, StreamingLLM):
            return self.sparse.sink, self.sparse.recent
        return 0, 0


WHOLE = KVRead(refinement=True)
BASE = KVRead(refinement=False)


@dataclass(frozen=True)
class KVPolicy:
    """How keys and values are stored, and what a draft reads of them; a target reads all.

    Attributes:
        kind: what is stored, and what a draft reads of it (BitNest paper A.2). Of a
            ``NestedKVCache``: ``"kv8"``, base and refinement; ``"kv4"``, the base; ``"recent"``,
            the refinement only in the last ``entries`` slots; ``"auto"``, KV8 up to a context of
            ``entries`` positions and KV4 above; ``"base"``, the base, which is then all that the
            target reads, too: a 4-bit cache, to compare with. ``"dense"``, the 16 bits of a
            ``DenseKVCache``; ``"quantspec"``, the base of a ``QuantSpecKVCache``.
        entries: n of ``recent(n)`` and ``auto(n)``, else 0.
        sparse: the positions that a draft attends to; None for all.
    """

    kind: Kind
    entries: int = 0
    sparse: SparseRead | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if (self.entries > 0) != (self.kind in ("recent", "auto")):
            raise ValueError(
                "entries must be at least 1 for 'recent' and 'auto' and 0 for other kinds, "
                f"got {self.entries!r} for {self.kind!r}"
            )
        if self.sparse is not None and not isinstance(self.sparse, SparseRead):
            raise ValueError(
                f"sparse must be a StreamingLLM, a SnapKV or None, got {self.sparse!r}"
            )
        if self.sparse is not None and self.kind == "quantspec":
            raise ValueError(
                f"sparse must be None for 'quantspec', got {self.sparse}: a hierarchical cache "
                "has no sparse drafts; take the storage '16/16', 'kv8/kv8' or 'kv4/kv8'"
            )

    @classmethod
    def parse(cls, text: "str | KVPolicy") -> Self:
        """The policy that a string names; a policy is returned as it is.

        Args:
            text: ``"draft/target"``, that is ``"kv8/kv8"``, ``"kv4/kv8"``, ``"kv4/kv4"`` or
                ``"16/16"``; or ``"recent(256)"`` or ``"auto(8192)"``. A sparse draft follows:
                ``"16/16+streaming(4,1020)"``, four positions at the beginning and 1020 at the end
                (:func:`streaming_llm`), or ``"kv8/kv8+snapkv(512)"`` (:func:`snapkv`). Or
                ``"quantspec"``.

        Raises:
            ValueError: the string names none.
        """
        if isinstance(text, cls):
            return text
        stored, plus, sparse = str(text).partition("+")
        match = _STORED.fullmatch(stored)
        of_draft = _SPARSE.fullmatch(sparse)
        if match is None or (plus and of_draft is None):
            raise ValueError(f"the KV policy must be {_FORMS}, got {text!r}")
        kind: Any = match["counted"] or _KINDS[stored]
        return cls(kind, int(match["entries"] or 0), _sparse_read(of_draft))

    def __str__(self) -> str:
        """The string that :meth:`parse` takes."""
        names = {kind: name for name, kind in _KINDS.items()}
        stored = names.get(self.kind, f"{self.kind}({self.entries})")
        return stored if self.sparse is None else f"{stored}+{self.sparse}"

    @property
    def drafts_as_target(self) -> bool:
        """Whether a draft reads all that a target reads, at any length."""
        return self.kind in ("kv8", "base", "dense") and self.sparse is None

    def stored(self) -> "KVPolicy":
        """The same without sparse drafts."""
        return replace(self, sparse=None)

    def read(self, view: View, context_length: int | None) -> KVRead:
        """What a view reads at a context length.

        Args:
            view: ``"draft"`` or ``"target"``.
            context_length: cached positions as the host knows them. Only ``auto`` looks at it.
        """
        if view == "target":
            return BASE if self.kind == "base" else WHOLE
        if self.kind == "recent":
            return KVRead(refinement=True, recent=self.entries, sparse=self.sparse)
        if self.kind == "auto" and context_length is None:
            raise ValueError("context_length must be given for the policy auto(n), got None")
        whole = self.kind in ("kv8", "dense")
        if self.kind == "auto":
            assert context_length is not None
            whole = context_length <= self.entries
        return KVRead(refinement=whole, sparse=self.sparse)


def _sparse_read(match: re.Match[str] | None) -> SparseRead | None:
    if match is None:
        return None
    sink, recent, budget = match.groups()
    return SnapKV(int(budget)) if budget else StreamingLLM(int(sink), int(recent))


def streaming_llm(sink: int = 4, *, recent: int, kv: str | KVPolicy = "16/16") -> KVPolicy:
    """A draft that attends to the first and the last positions alone (StreamingLLM).

    The query at position p attends to ``j < sink`` and to ``p - recent < j <= p``; the target to
    all. Nothing is stored besides the cache. The draft reads ``sink + recent`` positions whatever
    the context, rounded up to splits of 256. As in MagicDec and TriForce, which draft so, positions
    stay those of the whole text: StreamingLLM numbers them anew inside its cache, to go on beyond
    the context that a model was made for, which a draft of the same model need not.

    Args:
        sink: positions at the beginning, 0 for none.
        recent: positions at the end, the query's own included, at least 1.
        kv: what is stored, and what the draft reads of it: any policy but ``"quantspec"`` that is
            not sparse already.

    Returns:
        What ``kv=`` of :func:`nestq.speculative_generate` takes, as it does the string
        ``"16/16+streaming(4,1020)"``.

    Raises:
        ValueError: an argument is wrong.
    """
    return _sparse(StreamingLLM(sink, recent), kv)


def snapkv(budget: int, *, kv: str | KVPolicy = "16/16") -> KVPolicy:
    """A draft that attends to the positions of the prompt that the prompt's end attends to most.

    SnapKV (Li et al. 2024): each KV head keeps ``budget`` positions of the prompt, and the draft
    attends to them and to everything after the prompt; the target to all.
    :mod:`nestq.snapkv_cache` says how they are chosen. What drafts read is stored besides the cache
    that the target reads: ``budget`` positions and those after the prompt, in the same format.

    Args:
        budget: positions, above 32, the last tokens of the prompt, which vote and are kept. A
            shorter prompt is kept whole.
        kv: as for :func:`streaming_llm`.

    Returns:
        What ``kv=`` of :func:`nestq.speculative_generate` takes, as it does the string
        ``"16/16+snapkv(512)"``.

    Raises:
        ValueError: an argument is wrong.
    """
    return _sparse(SnapKV(budget), kv)


def _sparse(sparse: SparseRead, kv: str | KVPolicy) -> KVPolicy:
    policy = KVPolicy.parse(kv)
    if policy.sparse is not None:
        raise ValueError(f"kv must be a policy without sparse drafts, got {str(policy)!r}")
    return replace(policy, sparse=sparse)


def default_policy(model: nn.Module) -> KVPolicy:
    """The policy of a model for which the user names none.

    That which its checkpoint names (``quantization_config.kv``); without one ``"kv8/kv8"`` for a
    model with quantized weights, and ``"16/16"`` for a dense one.

    Args:
        model: a transformers model.
    """
    named = getattr(getattr(model.config, "quantization_config", None), "kv", None)
    if named is not None:
        return KVPolicy.parse(named)
    quantized = any(isinstance(weight, TorchAOBaseTensor) for weight in model.parameters())
    return KVPolicy.parse("kv8/kv8" if quantized else "16/16")
