"""The kernels of the KV cache compile for every supported GPU, with the loads they are to have."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nestq.kernels.append_16 import append_16_kernel
from nestq.kernels.attention_kernels import attention_kernel, combine_kernel
from nestq.kernels.hadamard import hadamard_kernel
from nestq.kernels.kv_append import kv_append_kernel
from nestq.kernels.kv_codes import BASE, BOTH, DENSE, RECENT
from nestq.kernels.rotate_append import rotate_append_kernel


def build(kernel, pointers, constants, warps):
    types = {name: "*" + dtype for name, dtype in pointers.items()}
    floats = {"score_factor": "fp32"}
    scalars = {name: floats.get(name, "i32") for name in kernel.arg_names}
    signature = scalars | types | dict.fromkeys(constants, "constexpr")
    aligned = [i for i, name in enumerate(kernel.arg_names) if name in types]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target, options)
    # What GPUs of compute capability 8.6 and 8.9 have for a program.
    assert compiled.metadata.shared <= 99 * 1024
    return compiled.asm["ptx"]


partial = dict.fromkeys(("sums", "exponents", "peaks", "totals"), "fp32") | {"positions": "i64"}
variants = [
    (BOTH, 16, True, 64),
    (BASE, 8, False, 128),
    (RECENT, 8, False, 64),
    (DENSE, 32, True, 64),
]
# A variant takes seconds; they differ little between GPUs.
for read, rows, all_splits, head_dim in variants if sys.argv[1] == "90" else variants[:1]:
    cache = "bf16" if read == DENSE else "i8"
    planes = ("key_base", "key_refinement", "value_base", "value_refinement")
    pointers = partial | dict.fromkeys(("query", "out"), "bf16") | dict.fromkeys(planes, cache)
    pointers |= {"key_scale": "fp32", "value_scale": "fp32"}
    constants = {"HEAD_DIM": head_dim, "PADDED": 32 if head_dim == 64 else 64, "ROWS": rows}
    constants |= {"VECTOR": 16 if head_dim == 128 else 8, "READ": read.value, "WINDOW": True}
    constants["LOCAL"] = head_dim == 64
    constants |= {"UNIT": -4, "ALL_SPLITS": all_splits, "AHEAD": read == BASE, "ASM": True}
    ptx = build(attention_kernel, pointers, constants, warps=4)
    number = "bf16" if read == DENSE else "f16"
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32" in ptx
    if head_dim == 128:
        # Eight loads of keys before the loop and eight in it; sixteen of values.
        assert ptx.count("ld.global.v4.b32") == 16
        assert ptx.count("ld.global.v2.b32") >= 16
constants = {"HEAD_DIM": 80, "COLUMNS": 32, "PADDED_SPLITS": 16, "UNROLL": 16}
pointers = partial | {"out": "bf16"}
build(combine_kernel, pointers, constants | {"WINDOW": True, "LOCAL": False, "UNIT": -4}, 1)
build(combine_kernel, pointers, constants | {"WINDOW": False, "LOCAL": True, "UNIT": -4}, 1)
planes = {"base": "u8", "refinement": "u8", "scale": "fp32"}
constants = {"HALF": 40, "PADDED": 64, "TOKENS": 4}
pointers = {"states": "bf16", "positions": "i64"} | planes
build(kv_append_kernel, pointers, constants, warps=1)
pointers = dict.fromkeys(("query", "key", "value", "cos", "sin", "out"), "bf16")
pointers |= {f"{side}_{name}": planes[name] for side in ("key", "value") for name in planes}
build(rotate_append_kernel, pointers | {"positions": "i64"}, constants | {"STEPS": None}, warps=1)
constants = {"HALF": 64, "PADDED": 64, "TOKENS": 4, "STEPS": 6}
build(rotate_append_kernel, pointers | {"positions": "i64"}, constants, warps=1)
pointers = dict.fromkeys(("keys", "values", "key_cache", "value_cache"), "bf16")
constants = {"HEAD_DIM": 80, "PADDED": 128, "TOKENS": 4}
build(append_16_kernel, pointers | {"positions": "i64"}, constants, warps=1)
for blocks, block in ((1, 128), (5, 16)):
    constants = {"BLOCKS": blocks, "BLOCK": block, "TOGETHER": 512 // block}
    constants |= {"STEPS": block.bit_length() - 1, "SCALE": block**-0.5}
    ptx = build(hadamard_kernel, dict.fromkeys(("x", "out"), "bf16"), constants, warps=1)
    assert "fma" not in ptx
"""


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_kernels_compile(capability: int) -> None:
    command = [sys.executable, "-c", COMPILE, str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
