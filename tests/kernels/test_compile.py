"""The kernels compile for every supported GPU: the interpreter accepts what compilers do not."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nestq.kernels import base_linear_16, linear_16, prefill_linear
from nestq.kernels.act_quant import act_quant_kernel
from nestq.kernels.dual_plane_linear import _assembly, dual_plane_linear_kernel, guess
from nestq.kernels.exact_sums import WIDE_MAD


def build(kernel, pointers, constants, warps, stages=1):
    types = {name: "*" + dtype for name, dtype in pointers.items()}
    floats = {"eps": "fp32"}
    scalars = {name: floats.get(name, "i32") for name in kernel.arg_names}
    signature = scalars | types | dict.fromkeys(constants, "constexpr")
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants), target, options)
    # What GPUs of compute capability 8.6 and 8.9 have for a program.
    assert compiled.metadata.shared <= 99 * 1024
    return compiled.asm["ptx"]


x = dict.fromkeys(("x", "other", "norm_weight", "total"), "bf16")
for gate in (False, True):
    build(
        act_quant_kernel,
        x | {"codes": "i8", "sums": "i32", "scale": "fp32"},
        {"CHUNK": 4096, "CHUNKS": 3, "SHARE": 1024, "SUM_WIDTH": 64}
        | {"ADD": not gate, "NORM": not gate, "GATE": gate, "IN_ROWS": False}
        | ({"LEVELS": 7.0, "CLIP": 0.9} if gate else {"LEVELS": 127.0, "CLIP": 1.0}),
        warps=8,
    )
x = dict.fromkeys(("x", "weight", "bias", "out"), "bf16")
division = {"TOKEN_TILES": 2, "TILES": 1, "WARPS": 4, "STAGES": 4}
ptx = build(linear_16.linear_16_kernel, x, division | {"SIZE": 1000, "HAS_BIAS": True}, warps=4)
assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
planes = {"base": "i8", "refinement": "i8", "scale_codes": "i32", "unit": "fp32"}
division |= {"SIZE": 576, "BLOCKS": 9, "GROUPS": 9, "GROUP_SIZE": 64, "HAS_BIAS": True}
for dtype in (torch.bfloat16, torch.float16):
    low, high = (base_linear_16._assembly(dtype, high) for high in (False, True))
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    x = dict.fromkeys(("x", "bias", "out"), name)
    constants = division | {"LOW": low, "HIGH": high}
    pointers = x | {key: planes[key] for key in ("base", "scale_codes", "unit")}
    build(base_linear_16.base_linear_16_kernel, pointers, constants, warps=4)
x = {"x_codes": "i8", "x_scale": "fp32", "bias": "bf16", "out": "bf16"}
for group_size, overlap in ((32, 8), (64, 0), (64, 8), (128, 16)):
    config = prefill_linear.prefill_config(group_size)
    low, high = prefill_linear._assembly(overlap)
    constants = {"BLOCKS": 10, "GROUPS": 640 // group_size, "GROUP_SIZE": group_size}
    constants |= {"OVERLAP": overlap, "HAS_BIAS": True, "ROWS": config.rows, "NEIGHBOURS": 16}
    constants |= {"TOKENS": config.tokens, "STEP_BLOCKS": config.blocks, "LOW": low, "HIGH": high}
    constants |= {"MAD": WIDE_MAD}
    kernel = prefill_linear.prefill_linear_kernel
    ptx = build(kernel, x | planes, constants, config.warps, config.stages)
    # Newer Tritons have tcgen05 for data-centre Blackwell.
    tensor_cores = {"90": ["wgmma"], "100": ["mma.sync.aligned.m16n8k32", "tcgen05.mma"]}
    names = tensor_cores.get(sys.argv[1], ["mma.sync.aligned.m16n8k32"])
    assert any(name in ptx for name in names)
operands = {"x_codes": "i8", "x_sums": "i32", "x_scale": "fp32", "base": "i8", "refinement": "i8"}
operands |= {"scale_codes": "i32", "unit": "fp32", "bias": "bf16", "out": "bf16"}
variants = [(0, 1, 1024), (0, 2, 64), (8, 1, 1024), (8, 5, 64), (8, 16, 64), (8, 64, 1024)]
for overlap, tokens, tiles in variants:
    low, high = _assembly(overlap)
    config = guess(tiles, tokens)
    sizes = {"BLOCKS": 65, "GROUPS": 65, "GROUP_SIZE": 64, "OVERLAP": overlap, "HAS_BIAS": True}
    division = {"TILES": config.tiles, "WARPS": config.warps, "STAGES": config.stages}
    assembly = {"LOW": low, "HIGH": high, "MAD": WIDE_MAD}
    used = {"TOKEN_TILES": -(-tokens // 8), "SINGLE": tokens == 1}
    constants = sizes | division | assembly | used
    ptx = build(dual_plane_linear_kernel, operands, constants, config.warps)
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in ptx
"""


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_kernels_compile(capability: int) -> None:
    command = [sys.executable, "-c", COMPILE, str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
