"""Planes that lie next to each other in memory are one plane of all their rows."""

from collections.abc import Sequence

from torch import Tensor


def merged(planes: Sequence[Tensor]) -> Tensor | None:
    """The tensor over the rows of all planes, if they are neighbours in one storage.

    Args:
        planes: at least one; rows are the first dimension.

    Returns:
        A view of all rows, in order; None unless each plane begins where the one before ends, with
        the same strides, dtype and sizes of a row.
    """
    first = planes[0]
    rows = 0
    for plane in planes:
        is_next = (
            plane.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and (plane.dtype, plane.device) == (first.dtype, first.device)
            and (plane.shape[1:], plane.stride()) == (first.shape[1:], first.stride())
            and plane.storage_offset() == first.storage_offset() + rows * first.stride(0)
        )
        if not is_next:
            return None
        rows += plane.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())
