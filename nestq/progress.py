"""Saying what takes long, where there is nothing to count."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from tqdm import tqdm

SECONDS = 1.0


@contextmanager
def said_if_slow(what: str, seconds: float = SECONDS) -> Iterator[None]:
    """Context that prints a line to stderr once it has taken so long.

    Args:
        what: is being done, for example ``"tracing the model"``.
        seconds: to wait before.
    """
    # tqdm's, so that no progress bar is broken.
    timer = Timer(seconds, tqdm.write, (f"nestq: {what} ...", sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
