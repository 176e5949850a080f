"""The kernels compile for every supported GPU: the interpreter accepts what compilers do not."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nestq.kernels.act_quant import act_quant_kernel
from nestq.kernels.dual_plane_linear import _assembly, dual_plane_linear_kernel


def build(kernel, pointers, constants, warps):
    types = {name: "*" + dtype for name, dtype in pointers.items()}
    floats = {"eps": "fp32"}
    scalars = {name: floats.get(name, "i32") for name in kernel.arg_names}
    signature = scalars | types | dict.fromkeys(constants, "constexpr")
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    return triton.compile(ASTSource(kernel, signature, constants), target, options).asm["ptx"]


x = dict.fromkeys(("x", "other", "norm_weight", "total"), "bf16")
build(
    act_quant_kernel,
    x | {"codes": "i8", "sums": "i32", "scale": "fp32"},
    {"COLUMNS": 1024, "SUM_WIDTH": 64, "ADD": True, "NORM": True, "GATE": False},
    warps=2,
)
operands = {"x_codes": "i8", "x_sums": "i32", "x_scale": "fp32", "base": "i8", "refinement": "i8"}
operands |= {"scale_codes": "i16", "unit": "fp32", "bias": "bf16", "out": "bf16"}
for overlap in (0, 8):
    low, high = _assembly(overlap)
    sizes = {"BLOCKS": 9, "GROUPS": 9, "GROUP_SIZE": 64, "OVERLAP": overlap, "HAS_BIAS": True}
    division = {"TOKEN_TILES": 1, "TILES": 2, "WARPS": 4, "UNROLL": 2, "LOW": low, "HIGH": high}
    ptx = build(dual_plane_linear_kernel, operands, sizes | division, warps=4)
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in ptx
"""


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_kernels_compile(capability: int) -> None:
    command = [sys.executable, "-c", COMPILE, str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
