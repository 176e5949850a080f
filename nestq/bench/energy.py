"""Energy that a GPU takes, as its driver counts it (NVML)."""

import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from nestq.bench.timing import Call

# The driver brings its counter up to date some ten times a second.
MEASURED_SECONDS = 2.0


class EnergyMeter:
    """Energy counter of one device.

    Args:
        device: to measure.

    Attributes:
        obstacle: why energy cannot be measured here; None if it can.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml: Any = None
        self._handle: Any = None
        self.obstacle = self._open()

    def _open(self) -> str | None:
        if self.device.type != "cuda":
            return "the device is no GPU"
        if find_spec("pynvml") is None:
            return "the package nvidia-ml-py is not installed"
        self._nvml = import_module("pynvml")
        try:
            self._nvml.nvmlInit()
            # Indices of NVML do not follow CUDA_VISIBLE_DEVICES.
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
            self._joules()
        except self._nvml.NVMLError as error:
            return f"NVML: {error}"
        return None

    def joules_per_call(self, call: Call, milliseconds: float) -> float | None:
        """Mean energy of a call that takes about so long; None where it cannot be measured."""
        if self.obstacle is not None:
            return None
        count = max(1, round(1000 * MEASURED_SECONDS / milliseconds))
        torch.cuda.synchronize(self.device)
        start = self._settled_joules()
        for _ in range(count):
            call()
        torch.cuda.synchronize(self.device)
        return (self._joules() - start) / count

    def _settled_joules(self) -> float:
        """The counter just after it has changed."""
        first = self._joules()
        end = time.monotonic() + 1
        while (now := self._joules()) == first and time.monotonic() < end:
            time.sleep(0.001)
        return now

    def _joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
