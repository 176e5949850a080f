"""The C++ of this folder as a library, compiled for the processor at hand when it is first needed.

Compiling takes about two seconds and is done once a process: nothing is kept on disk that could be
out of date or made for another processor.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

COMPILERS = ("c++", "g++", "clang++")
# Nothing that changes a result: no contraction to fused multiply-adds, no reordering of floats.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
)
# Arguments of each function: pointers, int64, double.
SIGNATURES = {
    "nestq_dequantize": "ppiiiiipi",
    "nestq_linear": "piipppipiiiiidpi",
    "nestq_kv_append": "ppiiiiippp",
    "nestq_hadamard": "piid",
    "nestq_attention_scores": "iiiiiiiiiiipppppdpi",
    "nestq_attention_sums": "iiiiiiiiiiippppppi",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
# Less is not worth waking a second thread for: some microseconds of work.
WORK_OF_A_THREAD = 1 << 18

_lock = threading.Lock()
_tried = False
_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL | None:
    """The library; None where it cannot be made, which a warning says once.

    The environment variable ``CXX`` is the compiler's command, if it is not one of ``COMPILERS``.
    """
    global _tried, _library
    if not _tried:
        with _lock:
            if not _tried:
                _library = _make()
                _tried = True
    return _library


def _make() -> ctypes.CDLL | None:
    try:
        return compile_library()
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            "nestq runs eager PyTorch on this CPU, with the same results but several times slower, "
            f"because its C++ could not be compiled: {reason.strip()}",
            stacklevel=2,
        )
        return None


def compile_library() -> ctypes.CDLL:
    """Compile and load.

    Raises:
        OSError: there is no compiler, or what it made cannot be loaded.
        CalledProcessError: it refuses.
    """
    found = next(filter(shutil.which, COMPILERS), "")
    compiler = shlex.split(os.environ.get("CXX") or found)
    if not compiler:
        raise FileNotFoundError(
            f"there is no C++ compiler: none of {COMPILERS}, and CXX is not set"
        )
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="nestq-") as folder:
        objects = [str(Path(folder, source.stem).with_suffix(".o")) for source in sources]
        for source, object_file in zip(sources, objects, strict=True):
            _run(*compiler, *FLAGS, "-c", str(source), "-o", object_file)
        # Linked without an OpenMP of its own, so that it shares PyTorch's and its threads.
        target = str(Path(folder, "nestq_cpu.so"))
        _run(*compiler, "-shared", *objects, "-o", target)
        made = ctypes.CDLL(target)
    for name, kinds in SIGNATURES.items():
        function = getattr(made, name)
        function.argtypes = [_TYPES[kind] for kind in kinds]
        function.restype = None
    return made


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor; None, which is null, for None."""
    return None if tensor is None else tensor.data_ptr()


def threads_for(work: int) -> int:
    """How many threads some steps of a few instructions deserve."""
    return max(1, min(torch.get_num_threads(), work // WORK_OF_A_THREAD))
