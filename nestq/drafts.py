"""Whether the draft of a model is another one than its target."""

from torch import Tensor, nn

from nestq.four_bit_tensor import FourBitTensor
from nestq.layer_skipping import skipped_in_draft
from nestq.tensor import NestedQuantTensor


def drafts_differently(model: nn.Module) -> bool:
    """Whether a draft computes something else than the target, whatever it reads of the cache.

    That is so where weights are read by view, or the draft skips layers.

    Args:
        model: any module.
    """
    by_view = any(_is_read_by_view(weight) for weight in model.parameters())
    return by_view or any(skipped_in_draft(model).values())


def _is_read_by_view(weight: Tensor) -> bool:
    if isinstance(weight, FourBitTensor):
        return weight.draft_bits != weight.target_bits
    return isinstance(weight, NestedQuantTensor)


def is_base_alone(weight: Tensor) -> bool:
    """Whether a weight has a target in principle, but only its base plane is loaded."""
    if isinstance(weight, FourBitTensor):
        return weight.target_bits is None and weight.dense is None
    return isinstance(weight, NestedQuantTensor) and weight.refinement is None
