"""The recipe of drafts that skip sublayers: Draft & Verify, alone or on top of other weights."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nestq.argument_checks import check_int, check_type
from nestq.calibration import calibration_windows
from nestq.four_bit_recipe import FourBitRecipe
from nestq.hf_quantizer import NestedConfig, attach
from nestq.layer_search import DraftMeter, SkippedDraft, check_searchable, search_layers
from nestq.layer_skipping import check_indices, check_skipped, skip_in_draft_, skipped_in_draft
from nestq.recipes import MAX_SEED, NestedRecipe, check_kv
from nestq.report import QuantizationReport

MAX_GAMMA = 16
# Of a row in the search: tokens of calibration text, and those that the model continues it with.
PROMPT_TOKENS = 64
NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class SkippingRecipe:
    """Which sublayers the draft skips, or how to find them, and the weights below.

    Attributes:
        attention: indices of the decoder layers whose attention the draft skips.
        mlp: indices of the decoder layers whose MLP it skips. If both are None, layers are
            searched; if one is, none of its kind is skipped.
        weights: recipe of the weights that draft and target read; None leaves the model's, which
            may be dense or quantized before.
        gamma: draft tokens a round that the search assumes, 1 to 16.
        tokens: of its own continuations on which the search measures drafts.
        kv: the model's default KV policy; None for that of the weights, ``"16/16"`` if dense.
        seed: of the choice of calibration text for the search, 0 to 2^64 - 1.
    """

    attention: tuple[int, ...] | None = None
    mlp: tuple[int, ...] | None = None
    weights: NestedRecipe | FourBitRecipe | None = None
    gamma: int = 4
    tokens: int = 1024
    kv: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in ("attention", "mlp"):
            if getattr(self, kind) is not None:
                object.__setattr__(self, kind, check_indices(kind, getattr(self, kind)))
        if not (self.searches or self.attention or self.mlp):
            raise ValueError(
                "attention and mlp must name a layer to skip, got "
                f"attention={self.attention!r} and mlp={self.mlp!r}; leave both out to search"
            )
        if self.weights is not None and not isinstance(self.weights, NestedRecipe | FourBitRecipe):
            raise TypeError(
                "weights must be a recipe such as bitnest_w4w8(), or None, "
                f"got {type(self.weights).__name__}"
            )
        check_int("gamma", self.gamma, 1, MAX_GAMMA)
        check_int("tokens", self.tokens, 1)
        if self.kv is not None:
            check_kv(self.kv)
        check_int("seed", self.seed, 0, MAX_SEED)

    @property
    def searches(self) -> bool:
        """Whether layers are to be found."""
        return self.attention is None and self.mlp is None

    def to_dict(self) -> dict[str, Any]:
        """Options as plain JSON values."""
        weights = None if self.weights is None else self.weights.to_dict()
        options = asdict(replace(self, weights=None))
        for kind in ("attention", "mlp"):
            options[kind] = None if options[kind] is None else list(options[kind])
        return {"name": "draft_and_verify", **options, "weights": weights}


def draft_and_verify(
    attention: Sequence[int] | None = None,
    mlp: Sequence[int] | None = None,
    weights: NestedRecipe | FourBitRecipe | None = None,
    **options: Any,
) -> SkippingRecipe:
    """Draft & Verify: the draft is the model without some attention and MLP sublayers.

    Layers that are given are used as they are. Else :func:`nestq.quantize_` searches for those
    without which decoding should be fastest, on continuations of calibration text by the model
    itself (``nestq.layer_search``). The target stays what it is, and so does all that it decodes.
    With ``weights=bitnest_w4w8()`` or another recipe the model is quantized first and the layers
    are skipped by its quantized draft.

    Zhang et al., Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
    Decoding, ACL 2024, sections 3.2 and 3.3.

    Args:
        attention: indices of the decoder layers whose attention the draft skips.
        mlp: indices of the decoder layers whose MLP it skips.
        weights: recipe of the weights.
        **options: of :class:`SkippingRecipe`, for the search.

    Raises:
        TypeError, ValueError: an option is off, or nothing would be skipped.
    """
    layers: dict[str, Any] = {"attention": attention, "mlp": mlp}
    return SkippingRecipe(**layers, weights=weights, **options)


def check_skipping_recipe(
    model: PreTrainedModel,
    recipe: SkippingRecipe,
    calibration: Any,
    tokenizer: object,
    batch_size: object,
) -> None:
    """Refuse what cannot be applied, before any work.

    Raises:
        TypeError, ValueError: a layer is missing, an argument of a search is off or missing, or the
            model's attention takes no masks.
        UnsupportedArchitectureError: the model's structure is unknown.
    """
    check_skipped(model, recipe.attention or (), recipe.mlp or ())
    if not recipe.searches:
        return
    if tokenizer is not None:
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a transformers tokenizer")
    check_int("batch_size", batch_size, 1)
    if calibration is None:
        raise ValueError(
            "calibration must be given to draft_and_verify() without attention= and mlp=, which "
            "searches for layers, got None"
        )
    check_searchable(model)


def apply_skipping_recipe(
    model: PreTrainedModel,
    recipe: SkippingRecipe,
    weights_report: QuantizationReport | None,
    *,
    calibration: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> QuantizationReport:
    """Let the draft of a model, whose weights are as they shall be, skip sublayers, in place.

    Args:
        model: that :func:`check_skipping_recipe` let pass.
        recipe: its ``weights`` are not looked at but to be saved.
        weights_report: of the weights, if they were made with this recipe.
        calibration: texts or token ids for the search (see ``calibration_windows``).
        tokenizer: for texts.
        batch_size: rows of a forward pass in the search.
        progress: show progress bars.

    Returns:
        The report of the weights, with a note of what is skipped.
    """
    start = time.perf_counter()
    draft = None
    if recipe.searches:
        prompts = _prompts(model, recipe, calibration, tokenizer)
        meter = DraftMeter(
            model, prompts, gamma=recipe.gamma, new_tokens=NEW_TOKENS, batch_size=batch_size
        )
        draft = search_layers(meter, progress=progress)
        skip_in_draft_(model, draft.layers("attention"), draft.layers("mlp"))
    else:
        skip_in_draft_(model, recipe.attention or (), recipe.mlp or ())
    seconds = {"layer search": time.perf_counter() - start} if recipe.searches else {}
    report = weights_report or QuantizationReport((), 0, 0, {})
    report = replace(
        report,
        seconds={**report.seconds, **seconds},
        notes=[*report.notes, _note(skipped_in_draft(model), draft)],
    )
    if draft is not None and draft.speed <= 1:
        warnings.warn(report.notes[-1], stacklevel=4)
    _attach(model, recipe, report, is_new=weights_report is not None)
    return report


def _prompts(
    model: PreTrainedModel,
    recipe: SkippingRecipe,
    calibration: Any,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Tensor:
    """Token ids ``[B, P]`` of some calibration text."""
    config: Any = model.config.get_text_config(decoder=True)
    room = config.max_position_embeddings - NEW_TOKENS
    if room < 1:
        raise ValueError(
            f"model must have a context of more than {NEW_TOKENS} tokens for a search of layers, "
            f"got {config.max_position_embeddings}"
        )
    length = min(PROMPT_TOKENS, room)
    windows = calibration_windows(calibration, tokenizer, config.vocab_size, length)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(recipe.seed))
    return windows[order[: -(-recipe.tokens // NEW_TOKENS)]]


def _note(skipped: dict[str, list[int]], draft: SkippedDraft | None) -> str:
    """What is skipped, and what is expected of it."""
    kinds = [f"{kind} of layers {_listed(indices)}" for kind, indices in skipped.items() if indices]
    note = f"the draft skips {' and '.join(kinds) or 'no layer: that is not expected to pay'}"
    if draft is None:
        return note
    return (
        f"{note}; it chooses the target's token at {draft.agreement:.1%} of positions, for "
        f"{draft.tokens_per_round:.2f} tokens a round of gamma {draft.gamma}, and reads "
        f"{draft.cost:.1%} of a verification's bytes: {draft.speed:.2f} times the speed of the "
        "target alone, where bytes take all of the time"
    )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def _attach(
    model: PreTrainedModel, recipe: SkippingRecipe, report: QuantizationReport, is_new: bool
) -> None:
    """Have the model saved with its recipe; what is known of weights made before stays."""
    old = getattr(model.config, "quantization_config", None)
    saved_recipe, saved_report = recipe.to_dict(), report.to_dict()
    kv = recipe.kv
    if isinstance(old, NestedConfig):
        if not is_new:
            saved_recipe["weights"] = old.recipe
            notes = [*(old.report or {}).get("notes", ()), *report.notes]
            saved_report = {**(old.report or {}), "notes": notes}
    elif kv is None:
        kv = "16/16"
    attach(model, saved_recipe, saved_report, kv)
