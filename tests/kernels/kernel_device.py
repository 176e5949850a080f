"""Where the arguments of kernels belong in tests."""

import torch


def device() -> torch.device:
    """The GPU or, for Triton's interpreter, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
