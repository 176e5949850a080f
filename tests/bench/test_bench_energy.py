"""Energy of a call, by a counter that goes in steps."""

from typing import Any

import pytest
import torch

from nestq.bench import energy
from nestq.bench.energy import EnergyMeter

WATTS = 500.0


class Device:
    """A clock, a device that takes power while it works, and NVML's counter of it in steps.

    Args:
        step: seconds between two steps of the counter.
        call_seconds: time of a call.
    """

    def __init__(self, step: float, call_seconds: float) -> None:
        self.step = step
        self.call_seconds = call_seconds
        self.now = 0.0321  # not at a step
        self.calls = 0

    def call(self) -> None:
        self.now += self.call_seconds
        self.calls += 1

    def monotonic(self) -> float:
        self.now += 1e-5  # so that waiting without calls ends
        return self.now

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:  # noqa: N802
        return int(1000 * WATTS * (self.now // self.step) * self.step)


def meter_of(device: Device, monkeypatch: pytest.MonkeyPatch) -> EnergyMeter:
    monkeypatch.setattr(energy, "time", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    meter = EnergyMeter(torch.device("cpu"))
    meter._nvml, meter.obstacle = device, None
    return meter


@pytest.mark.parametrize("step", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("milliseconds", [0.3, 4.0, 35.0])
def test_energy_is_that_of_whole_steps(
    step: float, milliseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(step, milliseconds / 1000)
    joules = meter_of(device, monkeypatch).joules_per_call(device.call, milliseconds)
    assert joules is not None
    # Each end of two seconds at least is known to the calls between two looks.
    look = max(energy.LOOK_MILLISECONDS, milliseconds) / 1000
    bound = 2 * (look + 2e-5) / energy.MEASURED_SECONDS
    assert joules == pytest.approx(WATTS * milliseconds / 1000, rel=bound)


def test_a_counter_that_stands_still_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(1e6, 0.001)
    assert meter_of(device, monkeypatch).joules_per_call(device.call, 1.0) is None
    assert device.now < 10


def test_without_a_gpu_nothing_is_called() -> None:
    device = Device(0.1, 0.001)
    assert EnergyMeter(torch.device("cpu")).joules_per_call(device.call, 1.0) is None
    assert device.calls == 0
