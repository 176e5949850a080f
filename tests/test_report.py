"""The report of a quantization: totals, JSON, table."""

import io
import json

import pytest
from rich.console import Console

from nestq.report import LinearReport, QuantizationReport

REPORT = QuantizationReport(
    linears=[
        LinearReport("model.layers.0.q", (10, 30), 0.125, 0.0125, 0.5, 0.1, 3),
        LinearReport("lm_head", (10, 10), 0.25, 0.025, 0.0, None, 0),
    ],
    calibration_tokens=4096,
    hessian_tokens=2048,
    seconds={"rotation": 1.25, "rounding": 0.5},
    notes=["a [note] with brackets"],
    tuning_loss=[0.5, 0.25],
)


def test_saturation_is_weighted_by_size() -> None:
    assert REPORT.saturation == 0.5 * 300 / 400
    assert QuantizationReport((), 0, 0, {}).saturation == 0


def test_as_json() -> None:
    values = json.loads(json.dumps(REPORT.to_dict()))
    assert values["saturation"] == 0.375
    assert (values["calibration_tokens"], values["hessian_tokens"]) == (4096, 2048)
    assert values["linears"][0]["shape"] == [10, 30]
    assert values["linears"][1]["damping"] is None
    assert values["tuning_loss"] == [0.5, 0.25]


@pytest.mark.parametrize(
    "expected",
    [
        "Nested 2 linears",
        "layers.0.q",
        "10x30",
        "12.50%",
        "1.250%",
        "50.00%",
        "0.1",
        "4096 calibration tokens, 2048 of them in Hessians; 37.50% of refinement codes saturated; "
        "rotation 1.2 s",
        "note: a [note] with brackets",
    ],
)
def test_printed(expected: str) -> None:
    output = io.StringIO()
    REPORT.print(Console(file=output, width=140))
    assert expected in " ".join(output.getvalue().split())
