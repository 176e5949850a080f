"""The registry: what is compared, how its weights are made, and what its drafts read of the cache.

A contender is a name for weights, a KV policy that may depend on the context, and whether the draft
skips layers. Contenders that share weights are measured one after the other on one quantized copy.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from nestq.four_bit_recipe import FourBitRecipe, qspec_w4, quantspec_w4w16, w4a8, w4a16
from nestq.kv_policy import KVPolicy
from nestq.quantize import quantize_
from nestq.recipes import NestedRecipe, W8A8Recipe, bitnest_w4w8, w8a8

# The first tokens that StreamingLLM keeps.
SINK = 4
# Above this context BitNest drafts with KV4 (BitNest paper, 3.4: short contexts read KV8).
LONG_CONTEXT = 8192


@dataclass(frozen=True)
class Calibration:
    """What quantizing looks at.

    Attributes:
        sequences: token ids; None rounds to nearest.
        batch_size: rows at once.
        progress: show progress bars.
    """

    sequences: Sequence[Sequence[int]] | None
    batch_size: int = 8
    progress: bool = True

    def arguments(self) -> dict[str, Any]:
        """Of :func:`nestq.quantize_`."""
        return {
            "calibration": self.sequences,
            "batch_size": self.batch_size,
            "progress": self.progress,
        }


@dataclass(frozen=True)
class Weights:
    """Weights that contenders share.

    Attributes:
        recipe: that makes them; None for the 16-bit model as it is.
        has_views: whether the model decodes in nestq's engine. torchao's own W8A8 does not: it is
            scored as any transformers model.
    """

    recipe: Callable[[], NestedRecipe | FourBitRecipe | W8A8Recipe] | None
    has_views: bool = True

    def made_of(self, model: PreTrainedModel, calibration: Calibration) -> PreTrainedModel:
        """The model with these weights; another one, unless it is the 16-bit model itself."""
        if self.recipe is None:
            return model
        made = copy.deepcopy(model)
        recipe = self.recipe()
        plain = isinstance(recipe, W8A8Recipe)
        with warnings.catch_warnings():
            # That there is no calibration was asked for.
            warnings.simplefilter("ignore", UserWarning)
            quantize_(made, recipe, **({} if plain else calibration.arguments()))
        return made


WEIGHTS = {
    "16-bit": Weights(None),
    "w8a8": Weights(w8a8, has_views=False),
    "w4a8": Weights(w4a8),
    "w4a16": Weights(w4a16),
    "bitnest": Weights(bitnest_w4w8),
    "quantspec": Weights(quantspec_w4w16),
    "qspec": Weights(qspec_w4),
}


@dataclass(frozen=True)
class Contender:
    """One way to decode.

    Attributes:
        name: as it is asked for and printed.
        weights: a key of ``WEIGHTS``.
        kv: the KV policy for a context of so many tokens.
        drafts: whether it drafts; a reference does not.
        skips: whether its draft skips layers, which a search on calibration text chooses.
        gamma: draft tokens a round; None for as many as are asked for.
    """

    name: str
    weights: str
    kv: Callable[[int], str]
    drafts: bool = True
    skips: bool = False
    gamma: int | None = None

    def policy(self, context: int) -> KVPolicy:
        """Its KV policy.

        Raises:
            ValueError: it has none for so short a context.
        """
        try:
            return KVPolicy.parse(self.kv(context))
        except ValueError as error:
            raise ValueError(
                f"--contexts {context}: too short for {self.name}, whose drafts read a quarter "
                f"of it: {error}"
            ) from error


def always(policy: str) -> Callable[[int], str]:
    """The same policy at any context."""
    return lambda context: policy


def _streaming(stored: str) -> Callable[[int], str]:
    """A quarter of the context: the first tokens and the last ones."""
    return lambda context: f"{stored}+streaming({SINK},{context // 4 - SINK})"


def _snapkv(stored: str) -> Callable[[int], str]:
    """A quarter of the context: what the end of the prompt attends to."""
    return lambda context: f"{stored}+snapkv({context // 4})"


BASELINE = Contender("16-bit", "16-bit", always("16/16"), drafts=False)
_ALL = (
    BASELINE,
    Contender("w8a8", "w8a8", always("16/16"), drafts=False),
    Contender("w4a8", "w4a8", always("kv8/kv8"), drafts=False),
    Contender("w4a16", "w4a16", always("16/16"), drafts=False),
    Contender("bitnest-kv8", "bitnest", always("kv8/kv8")),
    Contender("bitnest-kv4", "bitnest", always("kv4/kv8")),
    Contender("bitnest-auto", "bitnest", always(f"auto({LONG_CONTEXT})")),
    Contender("bitnest-quantspec-kv", "bitnest", always("quantspec")),
    Contender("bitnest-streaming-llm", "bitnest", _streaming("kv8/kv8")),
    Contender("bitnest-snapkv", "bitnest", _snapkv("kv8/kv8")),
    Contender("bitnest-skipping", "bitnest", always("kv8/kv8"), skips=True),
    Contender("quantspec", "quantspec", always("quantspec")),
    Contender("quantspec-weights", "quantspec", always("16/16")),
    Contender("quantspec-kv", "16-bit", always("quantspec")),
    Contender("qspec", "qspec", always("16/16")),
    Contender("draft-and-verify", "16-bit", always("16/16"), skips=True),
    Contender("streaming-llm", "16-bit", _streaming("16/16")),
    Contender("snapkv", "16-bit", _snapkv("16/16")),
)
CONTENDERS = {contender.name: contender for contender in _ALL}


def chosen(names: Sequence[str] | None) -> list[Contender]:
    """Contenders by name, in the order of the registry; all of them for None.

    The 16-bit baseline is always among them: the others are compared with it.

    Raises:
        ValueError: there is no such contender.
    """
    for name in names or ():
        if name not in CONTENDERS:
            raise ValueError(f"--recipes must be of {', '.join(CONTENDERS)}, got {name!r}")
    wanted = set(CONTENDERS if names is None else names) | {BASELINE.name}
    return [contender for contender in _ALL if contender.name in wanted]


def by_weights(contenders: Sequence[Contender]) -> dict[str, list[Contender]]:
    """Contenders that share weights, those that skip layers last."""
    groups: dict[str, list[Contender]] = {}
    for contender in sorted(contenders, key=lambda contender: contender.skips):
        groups.setdefault(contender.weights, []).append(contender)
    return groups
