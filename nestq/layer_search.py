"""Which sublayers a draft should skip: those without which decoding is expected to be fastest.

Draft & Verify (Zhang et al., ACL 2024, section 3.3) searches for the least decoding time of the
model's own continuations. Here a choice is measured in one forward pass. The target continues
prompts greedily; a draft then reads the target's keys and values of what came before, as it does in
decoding, and predicts all tokens of the continuations at once. Where it agrees with the target
follows how many tokens a round would yield, and the bytes that are left to read say what a draft
step costs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.utils import TorchAOBaseTensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from nestq.architectures import Architecture, SublayerKind, describe
from nestq.bench.bytes_read import weight_bytes
from nestq.calibration import evaluation_mode
from nestq.kv_cache import cache_keyword
from nestq.layer_skipping import skip_in_draft_, skipped_in_draft
from nestq.view import View, nest_view

# Sublayers from the top of the ranking that are tried in each step.
WIDTH = 4
# Steps without a faster draft after which the search ends.
PATIENCE = 4
# Attention with keys of draft and target side by side needs a mask of its own.
_IMPLEMENTATIONS = ("sdpa", "eager")


class Sublayer(NamedTuple):
    """The attention or the MLP of a decoder layer."""

    kind: SublayerKind
    layer: int


@dataclass(frozen=True)
class SkippedDraft:
    """A draft that skips sublayers, as measured on the target's continuations.

    Attributes:
        sublayers: that it skips, in order.
        gamma: draft tokens a round.
        agreement: share of positions at which it chooses the target's token.
        surprise: mean negative log-probability that it gives the target's token, in nats.
        tokens_per_round: that a round would yield.
        cost: bytes of weights that a draft step reads / bytes that a verification reads.
    """

    sublayers: tuple[Sublayer, ...]
    gamma: int
    agreement: float
    surprise: float
    tokens_per_round: float
    cost: float

    @property
    def speed(self) -> float:
        """Tokens in the time of a target step, where reading weights takes all of the time."""
        return self.tokens_per_round / (self.gamma * self.cost + 1)

    def layers(self, kind: SublayerKind) -> tuple[int, ...]:
        """Layers in which sublayers of a kind are skipped."""
        return tuple(layer for other, layer in self.sublayers if other == kind)


class Continuations(NamedTuple):
    """Prompts with the target's greedy continuations.

    Attributes:
        ids: int64 ``[B, P + N]``.
        known: bool ``[B, N]``, continuation up to the first end of sequence.
        cache: the target's keys and values of all tokens but the last.
        choices: int64 ``[B, N]``, what the target chooses in place of each token, in a pass of
            the kind in which drafts are measured: without differences of rounding, the same.
    """

    ids: Tensor
    known: Tensor
    cache: DynamicCache
    choices: Tensor


class DraftMeter:
    """Measures drafts of one model against the continuations of its target.

    Args:
        model: a causal language model of a known architecture, with any weights.
        prompts: int64 ``[B, P]``, without padding.
        gamma: draft tokens a round.
        new_tokens: that the target continues each prompt with.
        batch_size: rows of a forward pass.

    Raises:
        ValueError: ``model`` attends with an implementation that takes no masks.
        UnsupportedArchitectureError: the model's structure is unknown.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Tensor,
        *,
        gamma: int = 4,
        new_tokens: int = 64,
        batch_size: int = 16,
    ) -> None:
        check_searchable(model)
        self.model = model
        self.architecture = describe(model)
        self.gamma = gamma
        self.measurements = 0
        with evaluation_mode(model), torch.no_grad():
            self._continuations = [
                self._chosen(_continue(model, rows.to(model.device), new_tokens))
                for rows in prompts.split(batch_size)
            ]
        self._target_bytes = weight_bytes(model, "target")
        self._draft_bytes = weight_bytes(model, "draft")
        self._bytes = {
            sublayer: weight_bytes(
                self.architecture.sublayer(sublayer.layer, sublayer.kind), "draft"
            )
            for sublayer in sublayers(self.architecture)
        }

    def _chosen(self, given: Continuations) -> Continuations:
        logits = _logits(self.model, "target", given)
        return given._replace(choices=logits.argmax(-1))

    def share(self, sublayer: Sublayer) -> float:
        """Bytes of a sublayer in the draft / bytes that a verification reads."""
        return self._bytes[sublayer] / self._target_bytes

    def cost(self, skipped: Sequence[Sublayer]) -> float:
        """Bytes that a draft step reads / bytes that a verification reads."""
        return self._draft_bytes / self._target_bytes - sum(map(self.share, skipped))

    @torch.no_grad()
    def __call__(self, skipped: Sequence[Sublayer]) -> SkippedDraft:
        """Measure a draft that skips sublayers."""
        agreed: list[bool] = []
        surprise = 0.0
        with evaluation_mode(self.model), _skipping(self.model, skipped):
            for given in self._continuations:
                logits = _logits(self.model, "draft", given)[given.known]
                choices = given.choices[given.known]
                surprise += F.cross_entropy(logits.float(), choices, reduction="sum").item()
                agreed += (logits.argmax(-1) == choices).tolist()
        self.measurements += 1
        return SkippedDraft(
            tuple(sorted(skipped)),
            self.gamma,
            agreement=sum(agreed) / len(agreed),
            surprise=surprise / len(agreed),
            tokens_per_round=tokens_per_round(agreed, self.gamma),
            cost=self.cost(skipped),
        )


def check_searchable(model: PreTrainedModel) -> None:
    """Refuse a model whose drafts cannot be measured.

    Raises:
        ValueError: its attention takes no masks.
        UnsupportedArchitectureError: its structure is unknown.
    """
    describe(model)
    implementation = model.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"model must have an attn_implementation of {_IMPLEMENTATIONS} while layers are "
            f"searched, got {implementation!r}"
        )


def sublayers(architecture: Architecture) -> list[Sublayer]:
    """All sublayers of a model, first to last."""
    kinds: tuple[SublayerKind, ...] = ("attention", "mlp")
    return [Sublayer(kind, i) for i in range(len(architecture.layers)) for kind in kinds]


def search_layers(meter: DraftMeter, *, progress: bool = True) -> SkippedDraft:
    """The fastest draft found by adding sublayers one at a time.

    Each sublayer is skipped alone first, and ranked by what the draft loses for each byte that it
    saves. Then of the first ``WIDTH`` that are left the one is added with which the draft is
    fastest, until the last ``PATIENCE`` made it no faster. It is deterministic.

    Args:
        meter: measures drafts.
        progress: show progress bars.

    Returns:
        The fastest of all drafts that were measured. It may be the one that skips nothing, unless
        that costs as much as a verification: it would be the target itself.
    """
    whole = meter(())
    every = sublayers(meter.architecture)
    bar = tqdm(every, desc="ranking layers", unit="sublayer", disable=not progress)
    singles = [meter((sublayer,)) for sublayer in bar]

    def loss_per_byte(draft: SkippedDraft) -> float:
        return (draft.surprise - whole.surprise) / (whole.cost - draft.cost)

    left = [draft.sublayers[0] for draft in sorted(singles, key=loss_per_byte)]
    best = max(singles if whole.cost >= 1 else [whole, *singles], key=_speed)
    chosen: tuple[Sublayer, ...] = ()
    failures = 0
    # One sublayer must stay.
    steps = tqdm(range(len(left) - 1), desc="skipping layers", disable=not progress)
    for _ in steps:
        draft = max((meter((*chosen, one)) for one in left[:WIDTH]), key=_speed)
        chosen = draft.sublayers
        left = [one for one in left if one not in chosen]
        failures = 0 if draft.speed > best.speed else failures + 1
        best = max(best, draft, key=_speed)
        steps.set_postfix(speed=f"{best.speed:.3f}", skipped=len(best.sublayers))
        if failures == PATIENCE:
            break
    steps.close()
    return best


def _speed(draft: SkippedDraft) -> float:
    return draft.speed


def tokens_per_round(agreed: Sequence[bool], gamma: int) -> float:
    """Tokens a round of greedy decoding whose drafts agree with the target where it is said.

    Args:
        agreed: whether the draft agrees, token by token. Continuations may follow one another.
        gamma: draft tokens a round.
    """
    rounds = position = 0
    while position < len(agreed):
        drafts = agreed[position : position + gamma]
        accepted = next((i for i, agrees in enumerate(drafts) if not agrees), len(drafts))
        position += accepted + 1
        rounds += 1
    return len(agreed) / rounds


def _continue(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> Continuations:
    """Greedy tokens of the target, by plain forward passes outside of any view."""
    cache = DynamicCache()
    keywords: dict[str, Any] = {cache_keyword(model): cache, "use_cache": True}
    ids = last = prompts
    for _ in range(new_tokens):
        last = model(input_ids=last, **keywords).logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, last), dim=1)
    end = getattr(model.generation_config, "eos_token_id", None)
    ends = torch.tensor([] if end is None else end, dtype=ids.dtype, device=ids.device).flatten()
    ended = torch.isin(ids[:, -new_tokens:], ends)
    known = (ended.cumsum(1) - ended.long()) == 0
    return Continuations(ids, known, cache, ids[:, -new_tokens:])


class _BesideTarget(DynamicCache):
    """Hands out the target's keys and values, and behind them those of the pass itself."""

    def __init__(self, target: DynamicCache) -> None:
        super().__init__()
        self.target = target

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Nothing is kept."""
        layer: Any = self.target.layers[layer_idx]
        keys = torch.cat((layer.keys, key_states), dim=2)
        return keys, torch.cat((layer.values, value_states), dim=2)


class _FastView(nest_view):
    """A view in which dense weights are multiplied as outside of views.

    A row may then have other bits in other company, which decoding must not have and a measurement
    may; on a CPU it is many times as fast.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not isinstance(args[1], TorchAOBaseTensor):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _logits(model: PreTrainedModel, view: View, given: Continuations) -> Tensor:
    """Logits ``[B, N, V]`` of a view for each token of the continuations.

    A query reads its own key as the view makes it, and the target's of all tokens before. That is
    what the first draft step of a round reads. Later ones read the draft's keys of a few tokens,
    all of which the target agreed with; tokens a round come out within 3% of decoding. Sliding
    windows are not applied: prompts and continuations are shorter.
    """
    new = given.known.shape[1]
    length = given.ids.shape[1] - 1
    device = given.ids.device
    queries = torch.arange(length - new, length, device=device)[:, None]
    keys = torch.arange(length, device=device)
    visible = torch.cat((keys < queries, keys[-new:] == queries), dim=1)
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=device)
    mask = mask.masked_fill(~visible, torch.finfo(model.dtype).min)
    rows = len(given.ids)
    keywords: dict[str, Any] = {cache_keyword(model): _BesideTarget(given.cache)}
    with _FastView(view):
        return model(
            input_ids=given.ids[:, -new - 1 : -1],
            position_ids=queries.T.expand(rows, -1),
            attention_mask=mask.expand(rows, 1, -1, -1),
            use_cache=True,
            **keywords,
        ).logits


@contextmanager
def _skipping(model: nn.Module, skipped: Sequence[Sublayer]) -> Iterator[None]:
    """Let drafts skip sublayers for a while."""
    before = skipped_in_draft(model)
    attention = [layer for kind, layer in skipped if kind == "attention"]
    skip_in_draft_(model, attention, [layer for kind, layer in skipped if kind == "mlp"])
    try:
        yield
    finally:
        skip_in_draft_(model, before["attention"], before["mlp"])
