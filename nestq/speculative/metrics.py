"""What speculative decoding did: counts, rates and times."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from typing import Any, Literal

import torch

PHASES = ("prefill", "draft", "verification")


@dataclass(frozen=True)
class DecodingMetrics:
    """Counts and times of one call, or of several (:meth:`total`).

    A round is counted once for every row of the batch that is unfinished when it starts. Acceptance
    is what the comparison of draft and target gave: where the end-of-sequence token or the maximum
    length cuts a block, ``accepted`` counts the agreeing draft tokens behind the cut, too, and
    ``tokens`` does not.

    Attributes:
        gamma: draft tokens a round, or ``"auto"``, as asked for; None for calls that differ.
        batch: rows.
        rounds: row-rounds.
        verifications: forward passes of the target after the prefill, one a round of the batch.
        accepted_per_position: for each of the gamma positions, row-rounds that kept the draft token
            there, which takes the ones before it to be kept as well.
        tokens: new tokens in the output, without padding.
        prefill_seconds, draft_seconds, verification_seconds: time of these phases; the last two
            are None where a round is one CUDA graph.
        total_seconds: time from the start of the prefill to the last token.
        in_graph: whether rounds were replays of a CUDA graph; of several calls, of any.
        drafted_per_position: for each position, row-rounds that drafted a token there; None if all
            did.
        lookups: verifications of tokens that were looked up in the text, among all.
        host_seconds: time that the host took to take up the tokens of rounds: stopping criteria,
            streamer, bookkeeping. With CUDA graphs the next round runs meanwhile, else the device
            waits.
    """

    gamma: int | Literal["auto"] | None
    batch: int
    rounds: int
    verifications: int
    accepted_per_position: list[int]
    tokens: int
    prefill_seconds: float
    draft_seconds: float | None
    verification_seconds: float | None
    total_seconds: float
    in_graph: bool = False
    drafted_per_position: list[int] | None = None
    lookups: int = 0
    host_seconds: float = 0.0

    @classmethod
    def total(cls, results: Sequence["DecodingMetrics"]) -> "DecodingMetrics":
        """Counts and times of several calls, added up: rates are those of all their rounds.

        Phases are None where one of the calls does not have them.

        Raises:
            ValueError: there are no calls.
        """
        if not results:
            raise ValueError("results must hold the metrics of at least one call, got none")

        def positions(counts: Iterator[list[int]]) -> list[int]:
            return [sum(column) for column in zip_longest(*counts, fillvalue=0)]

        def seconds(name: str) -> float | None:
            parts = [getattr(one, f"{name}_seconds") for one in results]
            return None if None in parts else sum(parts)

        gammas = {one.gamma for one in results}
        return cls(
            gamma=gammas.pop() if len(gammas) == 1 else None,
            batch=sum(one.batch for one in results),
            rounds=sum(one.rounds for one in results),
            verifications=sum(one.verifications for one in results),
            accepted_per_position=positions(one.accepted_per_position for one in results),
            tokens=sum(one.tokens for one in results),
            prefill_seconds=sum(one.prefill_seconds for one in results),
            draft_seconds=seconds("draft"),
            verification_seconds=seconds("verification"),
            total_seconds=sum(one.total_seconds for one in results),
            in_graph=any(one.in_graph for one in results),
            drafted_per_position=positions(one.drafts for one in results),
            lookups=sum(one.lookups for one in results),
            host_seconds=sum(one.host_seconds for one in results),
        )

    @property
    def drafts(self) -> list[int]:
        """For each position, row-rounds that drafted a token there."""
        if self.drafted_per_position is None:
            return [self.rounds] * len(self.accepted_per_position)
        return self.drafted_per_position

    @property
    def drafted(self) -> int:
        """Draft tokens; gamma a row-round where gamma is a number and drafts do not stop early."""
        return sum(self.drafts)

    @property
    def rounds_per_gamma(self) -> dict[int, int]:
        """Row-rounds by the number of tokens that were drafted in them; numbers that occur."""
        at_least = [self.rounds, *self.drafts, 0]
        counts = {n: here - more for n, (here, more) in enumerate(pairwise(at_least))}
        return {n: count for n, count in counts.items() if count}

    @property
    def accepted(self) -> int:
        """Draft tokens that the target agreed with, up to the first disagreement of each round."""
        return sum(self.accepted_per_position)

    @property
    def slot_acceptance(self) -> float | None:
        """``accepted / drafted``; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """``1 + accepted / rounds``; None without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the draft tokens at each position that were kept, as far as any were drafted.

        With one gamma for all rounds their mean is the slot acceptance.
        """
        pairs = zip(self.accepted_per_position, self.drafts, strict=True)
        return [accepted / drafted for accepted, drafted in pairs if drafted]

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of the whole batch, prefill included."""
        return self.tokens / self.total_seconds

    def to_dict(self) -> dict[str, Any]:
        """Counts, times and rates as plain numbers that JSON can hold."""
        return asdict(self) | {
            "drafted": self.drafted,
            "rounds_per_gamma": self.rounds_per_gamma,
            "accepted": self.accepted,
            "slot_acceptance": self.slot_acceptance,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_per_position": self.acceptance_per_position,
            "tokens_per_second": self.tokens_per_second,
        }

    def summary(self) -> str:
        """A plain-text table with units."""
        per_position = " ".join(f"{share:.3f}" for share in self.acceptance_per_position)
        other = self.total_seconds - self.prefill_seconds
        other -= (self.draft_seconds or 0) + (self.verification_seconds or 0)
        lines = {
            "gamma": self._gamma_line(),
            "new tokens": f"{self.tokens} in {self.batch} row(s)",
            "rounds": f"{self.rounds} ({self.verifications} verifications of the batch)",
            "accepted": f"{self.accepted} of {self.drafted} draft tokens",
            "slot acceptance": _rate(self.slot_acceptance),
            "per position": per_position or "-",
            "tokens per round": _rate(self.tokens_per_round),
            "speed": f"{self.tokens_per_second:.2f} tokens/s",
            "total": f"{self.total_seconds:.3f} s",
            "  prefill": f"{self.prefill_seconds:.3f} s",
        }
        if self.in_graph:
            lines["  rounds"] = f"{other:.3f} s, CUDA graphs"
            lines["host"] = f"{self.host_seconds:.3f} s, beside them"
        else:
            lines["  draft"] = f"{self.draft_seconds:.3f} s"
            lines["  verification"] = f"{self.verification_seconds:.3f} s"
            lines["  host"] = f"{self.host_seconds:.3f} s"
            lines["  other"] = f"{other - self.host_seconds:.3f} s"
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())

    def _gamma_line(self) -> str:
        counts = self.rounds_per_gamma
        gamma = "several" if self.gamma is None else self.gamma
        line = f"{gamma} draft tokens a round"
        if set(counts) - {self.gamma}:
            shares = ", ".join(f"{n} in {count}" for n, count in counts.items())
            line = f"{gamma}; draft tokens in rounds: {shares}"
        if self.lookups:
            line += f"; looked up for {self.lookups} verification(s)"
        return line


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


class Clock:
    """Moments on a device's clock, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def now(self) -> Any:
        """The moment at which the device has done what is queued now."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two moments, which must have passed."""
        return start.elapsed_time(end) / 1000 if self.on_gpu else end - start


class Stopwatch:
    """Seconds of each phase and in total, on the device's clock, without waiting for the device.

    Seconds of the host are those of its own clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._host = 0.0
        self._spans: dict[str, list[tuple[Any, Any]]] = {phase: [] for phase in PHASES}
        self._start = self._clock.now()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time of the block for a phase, one of ``PHASES``."""
        start = self._clock.now()
        yield
        self._spans[phase].append((start, self._clock.now()))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count the time of the block for the host."""
        start = time.perf_counter()
        yield
        self._host += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """``<phase>_seconds`` for all phases, host and ``total_seconds``; waits for the device."""
        end = self._clock.now()
        if self._clock.on_gpu:
            end.synchronize()
        phases = {
            f"{phase}_seconds": sum((self._clock.between(*span) for span in spans), 0.0)
            for phase, spans in self._spans.items()
        }
        total = self._clock.between(self._start, end)
        return phases | {"host_seconds": self._host, "total_seconds": total}
