"""Where kernels run in tests: on the GPU or, without one, in Triton's interpreter.

Import this before anything that imports Triton: the interpreter is chosen when a kernel is defined.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def device() -> torch.device:
    """The device that test tensors live on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
