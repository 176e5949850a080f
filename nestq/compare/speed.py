"""Times of decoding, measured as ``nestq bench`` does, in the same engine."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from nestq.bench.acceptance import Acceptance
from nestq.bench.energy import EnergyMeter
from nestq.bench.measure import Case, Decoder, measure
from nestq.bench.models import Compiler, compiling, ready
from nestq.compare.contenders import Contender
from nestq.compare.results import Speed


@dataclass(frozen=True)
class Timer:
    """Times rounds at batch 1.

    Attributes:
        rounds: that are timed; the median counts.
        compiler: of models.
        energy: of the device.
    """

    rounds: int
    compiler: Compiler
    energy: EnergyMeter

    def time(self, model: PreTrainedModel, contender: Contender, context: int, gamma: int) -> Speed:
        """Time a round, or a step where gamma is 0, at a context.

        How many draft tokens are accepted makes no difference to the time of a round.
        """
        case = Case(
            system="speculative" if gamma else "w8a8",
            context=context,
            batch=1,
            gamma=gamma,
            kv=str(contender.policy(context)),
        )
        drawn = Acceptance.synthetic(0.5, gamma) if gamma else None
        with compiling():
            decoder = Decoder(contender.name, "checkpoint", model, ready(model, self.compiler))
            measured = measure(decoder, case, drawn, self.rounds, self.energy)
        draft, verification = measured.draft, measured.verification
        return Speed(
            round_milliseconds=measured.round.milliseconds,
            draft_milliseconds=None if draft is None else draft.milliseconds,
            verification_milliseconds=None if verification is None else verification.milliseconds,
            peak_bytes=measured.peak_bytes,
        )
