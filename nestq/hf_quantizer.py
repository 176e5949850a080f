"""How transformers reads and writes nested models: ``from_pretrained``, ``save_pretrained``.

Importing this module registers the method "nestq" with transformers' quantizer registry.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nestq.checkpoint_format import (
    FORMAT_VERSION,
    METHOD,
    Planes,
    check_dense_weights,
    check_nested_weights,
    check_planes_option,
    check_scales,
    plane_tensors,
    read_headers,
)
from nestq.tensor import NestedQuantTensor
from nestq.tensor_checks import check_options


@register_quantization_config(METHOD)
class NestedConfig(QuantizationConfigMixin):
    """The ``quantization_config`` in ``config.json`` of a nested model.

    Attributes:
        format_version: of the checkpoint, see :mod:`nestq.checkpoint_format`.
        group_size: weights that share a scale.
        overlap: target steps in a base step.
        modules: qualified names of the linear layers whose weight is nested.
        planes: ``"both"``, or ``"base"`` where there is no refinement: a draft alone.
        recipe: how the model was nested, for the reader; any JSON.
        report: what quantizing reported, for the reader; any JSON.
    """

    quant_method: Any  # transformers' own methods are an enumeration

    def __init__(
        self,
        *,
        format_version: int,
        group_size: int,
        overlap: int,
        modules: list[str],
        planes: Planes = "both",
        recipe: dict[str, Any] | None = None,
        report: dict[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        check_options(group_size, overlap)
        check_planes_option(planes)
        if not (isinstance(modules, list) and all(isinstance(name, str) for name in modules)):
            raise ValueError(f"modules must be a list of names, got {modules!r}")
        for name, value in (("recipe", recipe), ("report", report)):
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{name} must be an object or null, got {value!r}")
        self.quant_method = quant_method
        self.format_version = format_version
        self.group_size = group_size
        self.overlap = overlap
        self.modules = modules
        self.planes = planes
        self.recipe = recipe
        self.report = report

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Build from JSON.

        Raises:
            ValueError: the format is unknown, or an entry is missing, unknown or wrong.
        """
        version = config_dict.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"quantization_config.format_version must be {FORMAT_VERSION}, got {version!r}: "
                "the checkpoint is not of this version of nestq; a newer one may read it"
            )
        try:
            return super().from_dict(config_dict, return_unused_kwargs, **kwargs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"quantization_config: {error}") from error


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
        if config.planes == "base":
            # Not an unexpected tensor but one that is left where it is.
            ignored = set(model._keys_to_ignore_on_load_unexpected or ())
            model._keys_to_ignore_on_load_unexpected = ignored | {r"\.weight\.refinement$"}

    def _check_files(self, model: PreTrainedModel, checkpoint_files: list[str]) -> None:
        config = self.quantization_config
        headers = read_headers(checkpoint_files)
        nested = {
            name: tuple(model.get_parameter(f"{name}.weight").shape) for name in config.modules
        }
        self._stored_bytes = check_nested_weights(headers, nested, config.group_size, config.planes)
        left_out = {f"{name}.weight" for name in nested} | model.all_tied_weights_keys.keys()
        dense = {k: tuple(v.shape) for k, v in model.state_dict().items() if k not in left_out}
        renamed = bool(get_model_conversion_mapping(model, add_legacy=False))
        check_dense_weights(headers, dense, renamed)
        check_scales(headers, nested)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """The one rule of loading: planes and scale of a weight make its tensor."""
        sources = [_source_pattern(part) for part in plane_tensors(self.quantization_config.planes)]
        config = self.quantization_config
        return [
            WeightConverter(sources, ".weight", [_JoinPlanes(config.group_size, config.overlap)])
        ]

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Load planes and scales as stored: the model's dtype is what they stand for."""
        if _joins_planes(converter):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        # Saving would apply the rule of loading backwards, and so write `weight.base.base`.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [rule for rule in conversions if not _joins_planes(rule)]  # type: ignore[assignment]
        # The flag makes `half` and `float` raise; a nested weight survives both.
        model.is_quantized = False  # type: ignore[assignment]
        return model

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Plain tensors to save; the config is made to say what the model holds now."""
        old = self.quantization_config
        self.quantization_config = describe(model, old.recipe, old.report)
        model.config.quantization_config = self.quantization_config
        return _plain_tensors(model.state_dict()), {}


class _JoinPlanes(ConversionOps):
    """Make a ``NestedQuantTensor`` of the tensors that store it."""

    def __init__(self, group_size: int, overlap: int) -> None:
        self.group_size = group_size
        self.overlap = overlap

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        parts = {
            part: input_dict[_source_pattern(part)][0]
            for part in plane_tensors("both")
            if _source_pattern(part) in input_dict
        }
        name = kwargs["full_layer_name"]
        skeleton = kwargs["model"].get_parameter(name)
        weight = NestedQuantTensor(
            parts["base"],
            parts["scale"],
            self.group_size,
            self.overlap,
            skeleton.shape[1],
            skeleton.dtype,
            parts.get("refinement"),
        )
        return {name: nn.Parameter(weight.in_order_of_device(), requires_grad=False)}


def _source_pattern(part: str) -> str:
    return rf"\.weight\.{part}$"


def _joins_planes(rule: Any) -> bool:
    return any(isinstance(op, _JoinPlanes) for op in getattr(rule, "operations", ()))


def _plain_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if isinstance(tensor, NestedQuantTensor):
            stored = tensor.canonical()
            for part in stored.__tensor_flatten__()[0]:
                plain[f"{name}.{part}"] = getattr(stored, part)
        else:
            plain[name] = tensor
    return plain


def nested_weights(model: nn.Module) -> dict[str, NestedQuantTensor]:
    """Nested weights of a model by the name of their module."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), NestedQuantTensor)
    }


def refuse_compiled_parts(names: Iterable[str]) -> None:
    """Refuse module names that ``torch.compile`` changed: no other model could load them."""
    for name in names:
        if "_orig_mod" in name:
            raise ValueError(
                f"model: {name} is in a part that torch.compile wrapped: nest and save a model "
                "before its parts are compiled, or compile them in place by module.compile()"
            )


def describe(
    model: nn.Module, recipe: dict[str, Any] | None = None, report: dict[str, Any] | None = None
) -> NestedConfig:
    """The ``quantization_config`` of a model as it is.

    Raises:
        ValueError: no weight is nested, nested weights differ in group size, overlap or planes,
            recipe or report is not JSON, or a part of the model is compiled.
    """
    weights = nested_weights(model)
    refuse_compiled_parts(weights)
    formats = {(w.group_size, w.overlap, w.refinement is not None) for w in weights.values()}
    if not formats:
        raise ValueError("model has no nested weight: quantize it first")
    if len(formats) > 1:
        raise ValueError(
            "all nested weights of a model must agree in (group_size, overlap, has refinement), "
            f"got {sorted(formats)}"
        )
    for name, value in (("recipe", recipe), ("report", report)):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be JSON: {error}") from error
    group_size, overlap, has_refinement = formats.pop()
    return NestedConfig(
        format_version=FORMAT_VERSION,
        group_size=group_size,
        overlap=overlap,
        modules=list(weights),
        planes="both" if has_refinement else "base",
        recipe=recipe,
        report=report,
    )


def attach(
    model: PreTrainedModel,
    recipe: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
) -> None:
    """Make a model whose weights were just nested one that ``save_pretrained`` can save.

    Args:
        model: its linear layers hold :class:`NestedQuantTensor` weights.
        recipe: how it was nested, as JSON.
        report: what quantizing reported, as JSON.

    Raises:
        ValueError: see :func:`describe`.
    """
    config = describe(model, recipe, report)
    model.hf_quantizer = NestedQuantizer(config, pre_quantized=True)  # type: ignore[assignment]
    model.quantization_method = METHOD  # type: ignore[assignment]
    model.config.quantization_config = config
    if model.get_output_embeddings() is not None:
        _untie_nested_head(model)


def _untie_nested_head(model: PreTrainedModel) -> None:
    """Nothing may tie a nested head to the dense embedding again: not ``tie_weights``, no load."""
    if not isinstance(model.get_output_embeddings().weight, NestedQuantTensor):
        return
    model.config.tie_word_embeddings = False
    model.config.get_text_config(decoder=True).tie_word_embeddings = False
    nested = {f"{name}.weight" for name in nested_weights(model)}
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if target not in nested and source not in nested
    }
