"""Slow work is announced, once; quick work is not."""

import time

import pytest

from nestq.progress import said_if_slow


def test_slow_work_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_slow("counting sheep", seconds=0.01):
        time.sleep(0.3)
    captured = capsys.readouterr()
    assert captured.err == "nestq: counting sheep ...\n"
    assert captured.out == ""


def test_quick_work_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_slow("blinking", seconds=0.2):
        pass
    with pytest.raises(KeyError), said_if_slow("failing", seconds=0.2):
        raise KeyError
    time.sleep(0.4)
    assert capsys.readouterr().err == ""
