"""Run Triton kernels on a GPU where there is one, else in the interpreter on the CPU.

Import this before triton: it reads its environment when it is imported.
"""

import os

import torch


def device() -> str:
    """Where the kernels' arguments belong."""
    return "cuda" if torch.cuda.is_available() else "cpu"


if device() == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
