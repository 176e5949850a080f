"""Where the arguments of kernels belong: on a GPU, or on the CPU for the interpreter."""

import torch


def device() -> str:
    """The device that runs kernels in these tests."""
    return "cuda" if torch.cuda.is_available() else "cpu"
