"""Before anything imports triton: without a GPU its kernels run in the interpreter."""

import os

import pytest
import torch
from hypothesis import settings

# Timing is never a test: other work on the machine must not fail one.
settings.register_profile("nestq", deadline=None)
settings.load_profile("nestq")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
