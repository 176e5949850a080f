"""The ablations of the BitNest paper, tables 9 to 11, of any nested model.

The paper measures throughput of 7B models on one GPU; its tables are what ``--speed`` fills. What
does not need a clock is here, too: acceptance, perplexity, and what bytes say of the speed.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from rich.table import Table
from transformers import PreTrainedConfig

from nestq.compare.contenders import Contender, always
from nestq.compare.results import BytesRead, Result, Results
from nestq.compare.table import in_unit, narrow_table, number, unit_of
from nestq.kv_cache import head_sizes

Ablation = Literal["gamma", "draft-kv", "target-kv"]
ABLATIONS = get_args(Ablation)
# Draft tokens a round: the paper finds the most tokens a second at 4.
GAMMAS = (1, 2, 4, 6, 8)

# What drafts read of the cache, where the target reads 16 or 8 bits.
_DRAFT_KV = {"draft KV16": "16/16", "draft KV8": "kv8/kv8", "draft KV4": "kv4/kv8"}
# Name: the policy, and whether it drafts. Without drafts it is autoregressive decoding.
_TARGET_KV = {
    "AR KV16": ("16/16", False),
    "AR KV8": ("kv8/kv8", False),
    "AR KV4": ("kv4/kv4", False),
    "draft KV8, target KV8": ("kv8/kv8", True),
    "draft KV4, target KV8": ("kv4/kv8", True),
    "draft KV4, target KV4": ("kv4/kv4", True),
}


def ablation(kind: Ablation, gammas: Sequence[int], weights: str = "bitnest") -> list[Contender]:
    """What an ablation compares.

    Args:
        kind: ``"gamma"`` (table 9) varies the draft tokens of a round, with KV4 drafts;
            ``"draft-kv"`` (table 10) what drafts read of the cache; ``"target-kv"`` (table 11) what
            the target reads, alone and with drafts.
        gammas: for ``"gamma"``.
        weights: that all of them have.
    """
    if kind == "gamma":
        return [
            Contender(f"gamma {gamma}", weights, always("kv4/kv8"), gamma=gamma)
            for gamma in dict.fromkeys(gammas)
        ]
    table = {name: (kv, True) for name, kv in _DRAFT_KV.items()}
    if kind == "target-kv":
        table = _TARGET_KV
    return [
        Contender(name, weights, always(kv), drafts=drafts) for name, (kv, drafts) in table.items()
    ]


def ablation_tables(kind: Ablation, results: Results, config: PreTrainedConfig) -> list[Table]:
    """A table for each context, for ``rich``."""
    contexts = dict.fromkeys(one.context for one in results.results)
    return [_table(kind, results.at(context), context, config) for context in contexts]


def _table(kind: Ablation, some: Sequence[Result], context: int, config: PreTrainedConfig) -> Table:
    queries, (heads, _) = config.num_attention_heads, head_sizes(config)
    attention = "MHA" if heads == queries else "GQA"
    unit, size = unit_of([one.memory_bytes for one in some])
    gammas = sorted({one.gamma for one in some if one.gamma})
    gamma = f", gamma {gammas[0]}" if len(gammas) == 1 else ""
    table = narrow_table(
        f"{kind}: context {context}{gamma}, {attention} with {heads} of {queries} heads; "
        f"bytes in {unit}",
        "x AR: tokens over those of the target alone, if time were bytes"
        + ("; as MHA: if each query head had its own keys" if kind == "draft-kv" else ""),
    )
    timed = any(one.speed is not None for one in some)
    headers = ["slot\naccept.", "tokens\na round", "draft\nreads", "verify\nreads", "x AR"]
    if kind == "draft-kv":
        headers.append("x AR\nas MHA")
    if kind == "target-kv":
        headers.insert(0, "target\nppl")
    if timed:
        headers.append("tokens/s")
    for header in headers:
        table.add_column(header, justify="right")
    for one in some:
        cells = [
            number(one.slot_acceptance, 3),
            number(one.tokens_per_round if one.gamma else None, 2),
            in_unit(one.draft, size),
            in_unit(one.verification or one.step, size),
            number(over_target_alone(one), 2),
        ]
        if kind == "draft-kv":
            cells.append(number(over_target_alone(one, queries / heads), 2))
        if kind == "target-kv":
            cells.insert(0, number(one.perplexity, 3))
        if timed:
            cells.append(number(one.tokens_per_second, 1))
        table.add_row(one.name, *cells)
    return table


def over_target_alone(of: Result, cache_factor: float = 1.0) -> float | None:
    """Tokens over those of autoregressive decoding with the same target, if time were bytes.

    Args:
        of: a contender.
        cache_factor: how many times as much there is to read of the cache.
    """

    def total(read: BytesRead) -> float:
        return read.weights + cache_factor * read.cache

    if of.draft is None or of.verification is None:
        return 1.0
    if of.tokens_per_round is None:
        return None
    round_bytes = of.gamma * total(of.draft) + total(of.verification)
    return total(of.step) * of.tokens_per_round / round_bytes


def described(kind: Ablation) -> dict[str, Any]:
    """What an entry of the file is about, as JSON values."""
    table = {"gamma": 9, "draft-kv": 10, "target-kv": 11}[kind]
    return {"ablation": kind, "paper": f"BitNest, table {table}"}
