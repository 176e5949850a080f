"""Generation options as ``generate`` understands them, read before it is called."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from nestq.speculative.stopping import Stopping


def option_value(generate_kwargs: dict[str, Any], defaults: GenerationConfig, name: str) -> Any:
    """Value of a generation option: keywords win over a config, and that over the model's own."""
    if name in generate_kwargs:
        return generate_kwargs[name]
    value = getattr(generate_kwargs.get("generation_config"), name, None)
    return getattr(defaults, name, None) if value is None else value


def stop_strings_as_criteria(
    option: Callable[[str], Any], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Keywords of ``generate`` that stop at strings; it would not see the tokenizer itself."""
    strings = option("stop_strings")
    listed = [strings] if isinstance(strings, str) else strings
    if not (isinstance(listed, list) and listed and all(isinstance(s, str) and s for s in listed)):
        raise ValueError(
            "stop_strings must be a string or a list of strings, none of them empty, "
            f"got {strings!r}"
        )
    if tokenizer is None:
        raise ValueError("tokenizer must be given with stop_strings, got None")
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=listed)
    given = option("stopping_criteria") or []
    return {"stop_strings": None, "stopping_criteria": StoppingCriteriaList([*given, criterion])}


def pad_token(config: GenerationConfig, stopping: Stopping, batch: int) -> int:
    """What fills finished rows: as in transformers the pad token, else the first end token."""
    candidates = [config.pad_token_id, config.eos_token_id]
    token = next((token for token in candidates if token is not None), None)
    if token is None and batch > 1 and not stopping.rows_end_together:
        raise ValueError(
            "pad_token_id must be given for a batch whose rows may end at different lengths"
        )
    return int(torch.tensor(0 if token is None else token).flatten()[0])
