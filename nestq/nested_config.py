"""``NestedConfig``: the ``quantization_config`` of a model in ``config.json``."""

from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from nestq.checkpoint_format import (
    FORMAT_VERSION,
    METHOD,
    Planes,
    TargetPart,
    check_planes_option,
)
from nestq.kv_policy import KVPolicy
from nestq.layer_skipping import check_indices
from nestq.stored_weights import FourBitFormat
from nestq.tensor_checks import check_options


@register_quantization_config(METHOD)
class NestedConfig(QuantizationConfigMixin):
    """The ``quantization_config`` in ``config.json`` of a model.

    Attributes:
        format_version: of the checkpoint, see :mod:`nestq.checkpoint_format`.
        group_size: weights that share a scale; None where no weight is quantized.
        overlap: target steps in a base step; None where no weight is nested.
        modules: qualified names of the linear layers whose weight is quantized.
        planes: ``"both"``, or ``"base"`` where there is nothing that only the target reads: a
            draft alone.
        recipe: how the model was quantized, for the reader; any JSON.
        report: what quantizing reported, for the reader; any JSON.
        four_bit: entries of :class:`nestq.stored_weights.FourBitFormat`, where the weights are
            :class:`FourBitTensor`; None where they are nested.
        kv: the model's default KV policy, as :meth:`nestq.KVPolicy.parse` takes it, or None.
        skipped: indices of the decoder layers whose sublayers the draft skips,
            ``{"attention": [...], "mlp": [...]}``; None for none.
        rotate_keys: whether caches are to store keys rotated (:mod:`nestq.key_channels`).
    """

    quant_method: Any  # transformers' own methods are an enumeration

    def __init__(
        self,
        *,
        format_version: int,
        group_size: int | None,
        overlap: int | None,
        modules: list[str],
        planes: Planes = "both",
        recipe: dict[str, Any] | None = None,
        report: dict[str, Any] | None = None,
        four_bit: dict[str, Any] | None = None,
        kv: str | None = None,
        skipped: dict[str, list[int]] | None = None,
        rotate_keys: bool = False,
        quant_method: str = METHOD,
    ) -> None:
        check_planes_option(planes)
        if not (isinstance(modules, list) and all(isinstance(name, str) for name in modules)):
            raise ValueError(f"modules must be a list of names, got {modules!r}")
        _check_four_bit(four_bit)
        if modules:
            # Weights that are not nested have no overlap.
            check_options(group_size, overlap if four_bit is None else 1)
        if kv is not None:
            KVPolicy.parse(kv)
        _check_skipped(skipped)
        if not isinstance(rotate_keys, bool):
            raise ValueError(f"rotate_keys must be true or false, got {rotate_keys!r}")
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
        self.four_bit = four_bit
        self.kv = kv
        self.skipped = skipped
        self.rotate_keys = rotate_keys

    @property
    def four_bit_format(self) -> FourBitFormat | None:
        """``four_bit``, checked; None where the weights are nested."""
        return None if self.four_bit is None else FourBitFormat(**self.four_bit)

    @property
    def target_part(self) -> TargetPart | None:
        """The stored tensor of a weight that only a target reads; None for none."""
        four_bit = self.four_bit_format
        return "refinement" if four_bit is None else four_bit.target_part

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; entries that nested models do without are there only if they say something.

        So the checkpoints of nested models can be read by versions that do not know the rest.
        """
        return {
            name: value
            for name, value in super().to_dict().items()
            if value not in (None, False) or name not in _LEFT_OUT
        }

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


# Entries of a configuration that are left out where they are None or False.
_LEFT_OUT = ("four_bit", "kv", "skipped", "rotate_keys")


def _check_four_bit(entries: object) -> None:
    if entries is None:
        return
    if not isinstance(entries, dict):
        raise ValueError(f"four_bit must be an object or null, got {entries!r}")
    try:
        FourBitFormat(**entries)
    except (TypeError, ValueError) as error:
        raise ValueError(f"four_bit: {error}") from error


def _check_skipped(skipped: object) -> None:
    if skipped is None:
        return
    if not isinstance(skipped, dict) or skipped.keys() != {"attention", "mlp"}:
        raise ValueError(
            f"skipped must be an object with attention and mlp, or null, got {skipped!r}"
        )
    for name, indices in skipped.items():
        check_indices(f"skipped.{name}", indices)
