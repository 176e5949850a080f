"""Which configuration a kernel runs with: one readable file per GPU family, or measured once.

No configuration changes a bit of a result, so that measuring can go wrong in speed only. Files map
the name of a kernel and a bucket of shapes to a configuration. Families that have a file
(``kernels/configs``) take a good guess for what is not in it. On other GPUs the candidates are
timed and the best is kept in the user's cache.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from tqdm import tqdm
from triton.testing import do_bench

Config = TypeVar("Config", bound=tuple[int, ...])
Configs = dict[str, list[int]]

FAMILY_FILES = Path(__file__).parent / "configs"


def choose(
    kernel: str,
    bucket: str,
    candidates: Sequence[Config],
    run: Callable[[Config], Any],
    device: torch.device,
) -> Config:
    """The configuration for a bucket of shapes; the first candidate where none is to be measured.

    Args:
        kernel: name of the kernel.
        bucket: what the choice depends on, shapes rounded up to powers of two.
        candidates: configurations of one named tuple, a good guess first.
        run: launches the kernel with a configuration.
        device: where it runs.
    """
    if device.type != "cuda":
        return candidates[0]
    key = f"{kernel} {bucket}"
    known, measured_before = _known(
        torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    )
    # A graph that is being captured cannot wait for a measurement; the next call outside will.
    if key not in known and not measured_before and not torch.cuda.is_current_stream_capturing():
        known[key] = list(_fastest(key, candidates, run))
        _save(_cache_file(torch.cuda.get_device_name(device)), key, known[key])
    if key not in known:
        return candidates[0]
    return type(candidates[0])(*known[key])  # type: ignore[arg-type]  # named tuples


@cache
def _known(name: str, capability: tuple[int, int]) -> tuple[Configs, bool]:
    """What is known of a GPU, and whether its family has a file."""
    family = FAMILY_FILES / f"sm{capability[0]}{capability[1]}.json"
    if family.exists():
        return _read(family), True
    return _read(_cache_file(name)), False


def _read(file: Path) -> Configs:
    return json.loads(file.read_text()) if file.exists() else {}


def _fastest(key: str, candidates: Sequence[Config], run: Callable[[Config], Any]) -> Config:
    seconds = {}
    for config in tqdm(candidates, desc=f"tuning {key}, once for this GPU", file=sys.stderr):
        try:
            seconds[config] = do_bench(lambda config=config: run(config), warmup=5, rep=20)
        except triton.runtime.errors.OutOfResources:
            continue
    return min(seconds, key=seconds.__getitem__, default=candidates[0])


def _cache_file(name: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(root, "nestq", name.replace(" ", "-").lower() + ".json")


def _save(file: Path, key: str, config: list[int]) -> None:
    """Add an entry; the file is written under another name first and renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = _read(file) | {key: config}
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(entries.items()))
    temporary.write_text("{\n" + lines + "\n}\n")
    temporary.replace(file)
