"""Energy that a GPU takes, as its driver counts it (NVML)."""

import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from nestq.bench.timing import Call

# Time between two steps of the counter at least, and time to wait for one at most.
MEASURED_SECONDS = 2.0
PATIENCE_SECONDS = 2.0
# Time of the calls between two looks at the counter, which the driver brings up to date some ten
# times a second.
LOOK_MILLISECONDS = 5.0


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
        """Mean energy of a call that takes about so long; None where it cannot be measured.

        The counter goes in steps: what counts are the calls between one of its steps and another.
        """
        if self.obstacle is not None:
            return None
        count = max(1, round(LOOK_MILLISECONDS / milliseconds))
        start = self._calls_to_a_step(call, count, 0.0)
        end = None if start is None else self._calls_to_a_step(call, count, MEASURED_SECONDS)
        if start is None or end is None:
            return None
        return (end[1] - start[1]) / end[0]

    def _calls_to_a_step(
        self, call: Call, count: int, least_seconds: float
    ) -> tuple[int, float] | None:
        """Make calls until the counter changes, and so much time has passed.

        Returns:
            Calls that were made, and the counter; None if it does not change.
        """
        calls, begin = 0, time.monotonic()
        before = self._joules()
        while (passed := time.monotonic() - begin) < least_seconds + PATIENCE_SECONDS:
            for _ in range(count):
                call()
            torch.cuda.synchronize(self.device)
            calls += count
            now = self._joules()
            if now != before and passed >= least_seconds:
                return calls, now
            before = now
        return None

    def _joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
