"""What was measured of each contender: numbers, JSON, and taking up a file that was left behind."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from nestq.compare.contenders import BASELINE


@dataclass(frozen=True)
class BytesRead:
    """What a forward pass reads, at batch 1.

    Attributes:
        weights: bytes of parameters.
        cache: bytes of keys and values.
    """

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.cache


@dataclass(frozen=True)
class Speed:
    """Time of decoding at batch 1.

    Attributes:
        round_milliseconds: of a round; without drafts, of a step.
        draft_milliseconds: of a draft step; None without drafts.
        verification_milliseconds: None without drafts.
        peak_bytes: most memory in use on a GPU; None on a CPU.
    """

    round_milliseconds: float
    draft_milliseconds: float | None
    verification_milliseconds: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Result:
    """One contender at one context. Bytes are those of one row, as if the batch were 1.

    Attributes:
        name: of the contender.
        weights: their name.
        kv: its KV policy.
        context: tokens of each prompt.
        gamma: draft tokens a round; 0 for a reference.
        weight_bytes: of all parameters.
        cache_bytes: of the cache, with room for the context and the new tokens.
        step: what the target reads for one token.
        draft: what a draft step reads; None without drafts.
        verification: what a verification of gamma + 1 tokens reads; None without drafts.
        skipped: sublayers that the draft skips; None if it skips none.
        perplexity: of the target on the prompts; None if it was not scored.
        scored_tokens: that were predicted for it.
        acceptance: whether it was measured on the prompts or is synthetic; None without drafts.
        slot_acceptance: accepted / all draft tokens.
        tokens_per_round: 1 without drafts.
        acceptance_per_position: share of draft tokens kept at each position.
        new_tokens: that were generated in all.
        measured_peak_bytes: on a GPU, most memory in use while the prompts were answered, all at
            once; None elsewhere.
        speed: at batch 1; None if it was not timed.
        seconds: that measuring took, without quantizing.
    """

    name: str
    weights: str
    kv: str
    context: int
    gamma: int
    weight_bytes: int
    cache_bytes: int
    step: BytesRead
    draft: BytesRead | None = None
    verification: BytesRead | None = None
    skipped: dict[str, list[int]] | None = None
    perplexity: float | None = None
    scored_tokens: int = 0
    acceptance: Literal["measured", "synthetic"] | None = None
    slot_acceptance: float | None = None
    tokens_per_round: float | None = None
    acceptance_per_position: list[float] = field(default_factory=list)
    new_tokens: int = 0
    measured_peak_bytes: int | None = None
    speed: Speed | None = None
    seconds: float = 0.0

    @property
    def first_position(self) -> float | None:
        """Share of rounds whose first draft token was kept; None if it is not known."""
        return self.acceptance_per_position[0] if self.acceptance_per_position else None

    @property
    def memory_bytes(self) -> int:
        """Weights and the cache of one row."""
        return self.weight_bytes + self.cache_bytes

    @property
    def bytes_per_token(self) -> float | None:
        """Read for each new token: of a round, divided by the tokens that it gives."""
        if self.draft is None or self.verification is None:
            return self.step.total
        if self.tokens_per_round is None:
            return None
        return (self.gamma * self.draft.total + self.verification.total) / self.tokens_per_round

    @property
    def tokens_per_second(self) -> float | None:
        """At batch 1; None if it was not timed or acceptance is not known."""
        if self.speed is None or self.tokens_per_round is None:
            return None
        return 1000 * self.tokens_per_round / self.speed.round_milliseconds

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> "Result":
        """What :meth:`Results.to_dict` made an entry of."""
        known = {known.name: entry[known.name] for known in fields(cls)}
        for name in ("step", "draft", "verification"):
            known[name] = None if known[name] is None else BytesRead(**known[name])
        known["speed"] = None if known["speed"] is None else Speed(**known["speed"])
        return cls(**known)


@dataclass
class Results:
    """All results of a command.

    Attributes:
        made_by: how they were made, as JSON values.
        settings: what they depend on, as JSON values: those of a file must be the same to go on.
        results: in the order of measurement.
    """

    made_by: dict[str, Any]
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def has(self, name: str, context: int) -> bool:
        """Whether a contender was measured at a context."""
        return any((one.name, one.context) == (name, context) for one in self.results)

    def at(self, context: int) -> list[Result]:
        """Results of a context."""
        return [one for one in self.results if one.context == context]

    def baseline(self, of: Result) -> Result | None:
        """The 16-bit model alone, at the same context."""
        return next((one for one in self.at(of.context) if one.name == BASELINE.name), None)

    def expected_speedup(self, of: Result) -> float | None:
        """Over the 16-bit model, if time were bytes; None if acceptance is not known."""
        baseline, own = self.baseline(of), of.bytes_per_token
        if baseline is None or own is None:
            return None
        return baseline.step.total / own

    def speedup(self, of: Result) -> float | None:
        """Tokens a second over those of the 16-bit model; None if one of them is not known."""
        baseline = self.baseline(of)
        if baseline is None or baseline.tokens_per_second is None or of.tokens_per_second is None:
            return None
        return of.tokens_per_second / baseline.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON values."""
        derived = ("first_position", "memory_bytes", "bytes_per_token", "tokens_per_second")
        return self.made_by | {
            "settings": self.settings,
            "results": [
                asdict(one)
                | {name: getattr(one, name) for name in derived}
                | {
                    "expected_speedup": self.expected_speedup(one),
                    "speedup": self.speedup(one),
                }
                for one in self.results
            ],
        }


def left_behind(path: Path, settings: dict[str, Any]) -> list[Result]:
    """The results of a file that a stopped run with the same settings wrote; none without a file.

    Raises:
        ValueError: the file holds something else, or was made with other settings.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = [Result.from_dict(entry) for entry in content["results"]]
        others = content["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume {path}: not the results of such a run: {error!r}") from error
    for name, value in json.loads(json.dumps(settings)).items():
        if others.get(name) != value:
            raise ValueError(
                f"--resume {path}: it was made with {name} {others.get(name)!r}, got {value!r}"
            )
    return found
