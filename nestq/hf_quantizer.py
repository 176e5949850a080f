"""How transformers reads and writes quantized models: ``from_pretrained``, ``save_pretrained``.

Importing this module registers the method "nestq" with transformers' quantizer registry.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from nestq.checkpoint_format import (
    METHOD,
    check_dense_weights,
    check_nested_weights,
    check_scales,
    read_headers,
)
from nestq.kv_cache import rotates_keys
from nestq.layer_skipping import skip_in_draft_
from nestq.model_description import (
    describe,
    nested_weights,
    quantized_weights,
    refuse_compiled_parts,
    share_tied_head_,
    tied_head,
)
from nestq.nested_config import NestedConfig
from nestq.stored_weights import QuantizedWeight, joining_rule, joins_planes, plain_tensors

__all__ = [
    "NestedConfig",
    "NestedQuantizer",
    "attach",
    "describe",
    "nested_weights",
    "quantized_weights",
    "refuse_compiled_parts",
    "share_tied_head_",
]


@register_quantizer(METHOD)
class NestedQuantizer(HfQuantizer):
    """Loads and saves planes; it never quantizes: ``nestq.quantize_`` does."""

    requires_calibration = True  # refuses from_pretrained(dense, quantization_config=...)
    quantization_config: NestedConfig

    def __init__(self, quantization_config: NestedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._stored_bytes: dict[str, int] = {}

    @property
    def is_trainable(self) -> bool:
        """Codes are integers: nothing to train."""
        return False

    @property
    def is_compileable(self) -> bool:
        """``torch.compile(fullgraph=True)`` works in every view."""
        return True

    def is_serializable(self) -> bool:
        """Nested models can be saved."""
        return True

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes a weight, by which transformers sizes device maps and allocations."""
        stored = self._stored_bytes.get(param_name.removesuffix(".weight"))
        return param.element_size() if stored is None else stored / param.numel()

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Check all headers against the model, still without weights, and then the scales.

        Scales are the only tensors that are read here, and none is if a header is off. Without
        files the weights are a state dict that the caller holds.
        """
        config = self.quantization_config
        modules = dict(model.named_modules())
        for name in config.modules:
            if not isinstance(modules.get(name), nn.Linear):
                raise ValueError(
                    f"quantization_config.modules lists {name!r}, which is no linear layer of "
                    f"{type(model).__name__}; the checkpoint is of {model.config.architectures}"
                )
        if checkpoint_files is not None:
            self._check_files(model, checkpoint_files)
        if config.planes == "base" and config.target_part is not None:
            # Not an unexpected tensor but one that is left where it is.
            ignored = set(model._keys_to_ignore_on_load_unexpected or ())
            pattern = rf"\.weight\.{config.target_part}$"
            model._keys_to_ignore_on_load_unexpected = ignored | {pattern}

    def _check_files(self, model: PreTrainedModel, checkpoint_files: list[str]) -> None:
        config = self.quantization_config
        headers = read_headers(checkpoint_files)
        nested = {
            name: tuple(model.get_parameter(f"{name}.weight").shape) for name in config.modules
        }
        self._stored_bytes = check_nested_weights(
            headers,
            nested,
            config.group_size or 0,
            config.planes,
            config.target_part,
            tied_head(model, config),
        )
        left_out = {f"{name}.weight" for name in nested} | model.all_tied_weights_keys.keys()
        dense = {k: tuple(v.shape) for k, v in model.state_dict().items() if k not in left_out}
        renamed = bool(get_model_conversion_mapping(model, add_legacy=False))
        check_dense_weights(headers, dense, renamed)
        check_scales(headers, nested)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """The one rule of loading: planes and scale of a weight make its tensor."""
        config = self.quantization_config
        if not config.modules:
            return []
        return [
            joining_rule(
                config.planes,
                config.target_part,
                config.group_size or 0,
                config.overlap or 0,
                config.four_bit_format,
            )
        ]

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Load planes and scales as stored: the model's dtype is what they stand for."""
        if joins_planes(converter):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        # Saving would apply the rule of loading backwards, and so write `weight.base.base`.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [rule for rule in conversions if not joins_planes(rule)]  # type: ignore[assignment]
        # The flag makes `half` and `float` raise; a nested weight survives both.
        model.is_quantized = False  # type: ignore[assignment]
        config = self.quantization_config
        share_tied_head_(model, config)
        if config.skipped is not None:
            skip_in_draft_(model, **config.skipped)
        return model

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Plain tensors to save; the config is made to say what the model holds now."""
        old = self.quantization_config
        self.quantization_config = describe(model, old.recipe, old.report, old.kv, old.rotate_keys)
        model.config.quantization_config = self.quantization_config
        tied = tied_head(model, self.quantization_config)
        return plain_tensors(model.state_dict(), tied), {}


def attach(
    model: PreTrainedModel,
    recipe: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    kv: str | None = None,
    rotate_keys: bool | None = None,
) -> None:
    """Make a model that was just quantized, or skips layers, one that ``save_pretrained`` can save.

    Args:
        model: its linear layers may hold quantized weights, and its draft may skip layers.
        recipe: how it was quantized, as JSON.
        report: what quantizing reported, as JSON.
        kv: its default KV policy; None keeps the one that it has.
        rotate_keys: whether caches are to store its keys rotated; None keeps what it has.

    Raises:
        ValueError: see :func:`describe`.
    """
    old = getattr(model.config, "quantization_config", None)
    if kv is None and isinstance(old, NestedConfig):
        kv = old.kv
    if rotate_keys is None:
        rotate_keys = rotates_keys(model.config)
    config = describe(model, recipe, report, kv, rotate_keys)
    model.hf_quantizer = NestedQuantizer(config, pre_quantized=True)  # type: ignore[assignment]
    model.quantization_method = METHOD  # type: ignore[assignment]
    model.config.quantization_config = config
    if model.get_output_embeddings() is not None:
        _untie_quantized_head(model)


def _untie_quantized_head(model: PreTrainedModel) -> None:
    """Nothing may tie a quantized head to the dense embedding: not ``tie_weights``, no load."""
    if not isinstance(model.get_output_embeddings().weight, QuantizedWeight):
        return
    model.config.tie_word_embeddings = False
    model.config.get_text_config(decoder=True).tie_word_embeddings = False
    quantized = {f"{name}.weight" for name in quantized_weights(model)}
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if target not in quantized and source not in quantized
    }
