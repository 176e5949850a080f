"""Which configuration a kernel runs with: one readable file per GPU family, or measured once.

No configuration changes a bit of a result, so that measuring can go wrong in speed only. Files map
the name of a kernel and a bucket of shapes to a configuration. Families that have a file
(``kernels/configs``) take a good guess for what is not in it. On other GPUs the candidates are
timed and the best is kept in the user's cache.
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
import triton
from tqdm import tqdm
from triton.testing import do_bench

Config = TypeVar("Config", bound=tuple[int, ...])
Configs = dict[str, list[int]]

FAMILY_FILES = Path(__file__).parent / "configs"

_chosen: dict[tuple[str, torch.device], tuple[int, ...]] = {}
# One measurement at a time: two would disturb each other.
_measuring = Lock()


def choose(
    kernel: str,
    bucket: str,
    candidates: Sequence[Config],
    run: Callable[[Config], Any],
    device: torch.device,
) -> Config:
    """The configuration for a bucket of shapes; the first candidate where none is to be measured.

    Measuring waits for the device, and a graph that is being captured cannot: during a capture of
    the calling thread nothing is measured. Where other threads capture, run the model once before.

    Args:
        kernel: name of the kernel.
        bucket: what the choice depends on, shapes rounded up to powers of two.
        candidates: configurations of one named tuple, a good guess first.
        run: launches the kernel with a configuration.
        device: where it runs; the current device.
    """
    if device.type != "cuda":
        return candidates[0]
    key = f"{kernel} {bucket}"
    config = _chosen.get((key, device))
    if config is None:
        if torch.cuda.is_current_stream_capturing():
            return candidates[0]
        with _measuring:
            config = _look_up_or_measure(key, candidates, run, device)
            _chosen[key, device] = config
    return type(candidates[0])(*config)  # type: ignore[arg-type]  # named tuples


def _look_up_or_measure(
    key: str, candidates: Sequence[Config], run: Callable[[Config], Any], device: torch.device
) -> tuple[int, ...]:
    major, minor = torch.cuda.get_device_capability(device)
    family = FAMILY_FILES / f"sm{major}{minor}.json"
    file = family if family.exists() else _cache_file(torch.cuda.get_device_name(device))
    known = _read(file).get(key)
    if known is not None and len(known) == len(candidates[0]):
        return tuple(known)
    if file == family:
        return candidates[0]
    fastest = _fastest(key, candidates, run)
    _save(file, key, list(fastest))
    return fastest


def _read(file: Path) -> Configs:
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} cannot be read and is not used: {error}", stacklevel=2)
        return {}


def _fastest(key: str, candidates: Sequence[Config], run: Callable[[Config], Any]) -> Config:
    milliseconds = {}
    different = dict.fromkeys(candidates)
    for config in tqdm(different, desc=f"tuning {key}, once for this GPU", file=sys.stderr):
        try:
            milliseconds[config] = do_bench(lambda config=config: run(config), warmup=5, rep=20)
        except triton.runtime.errors.OutOfResources:
            continue
    return min(milliseconds, key=milliseconds.__getitem__, default=candidates[0])


def _cache_file(name: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "nestq", name.replace(" ", "-").lower() + ".json")


def _save(file: Path, key: str, config: list[int]) -> None:
    """Add an entry; the file is written under another name first and renamed.

    Where two processes do so at once, one entry is lost and will be measured again.
    """
    entries = _read(file) | {key: config}
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(entries.items()))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write("{\n" + lines + "\n}\n")
        Path(temporary.name).replace(file)
    except OSError as error:
        warnings.warn(f"{file} cannot be written, so this is not kept: {error}", stacklevel=2)
