"""What the subcommands of ``nestq`` share: kinds of arguments, models, files of results."""

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from nestq.checkpoint import check_writable


def positive(text: str) -> int:
    """An argument that is a whole number >= 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """An argument that is a whole number >= 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got {text!r}")
    return value


def not_negative_or_auto(text: str) -> int | Literal["auto"]:
    """An argument that is a whole number >= 0, or "auto"."""
    return "auto" if text == "auto" else not_negative(text)


def above_zero(text: str) -> float:
    """An argument that is a number > 0."""
    return _number_within(text, math.inf, "a number above 0")


def share(text: str) -> float:
    """An argument that is a number > 0 and <= 1."""
    return _number_within(text, 1, "a number above 0, at most 1")


def _number_within(text: str, most: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= most and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def add_command(commands: Any, name: str, run: Callable[..., None], text: str, example: str) -> Any:
    """The parser of a subcommand.

    Args:
        commands: where subcommands are added.
        name: of the command.
        run: called with the options and a console.
        text: what it does.
        example: a whole command line.
    """
    command = commands.add_parser(
        name,
        help=text,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example:\n  {example}",
    )
    command.set_defaults(run=run)
    return command


def fetch(read: Callable[[str], Any], source: str) -> Any:
    """What is read of a source; an error says which of the models it was."""
    try:
        return read(source)
    except OSError as error:
        if Path(source).expanduser().exists():
            raise
        raise OSError(f"{source}: neither a folder nor a model to fetch: {error}") from error


def check_output(option: str, path: Path) -> None:
    """Refuse a path that no file can be written to, by the option that names it."""
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path}: a folder, expected a file")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder to write it to")
    check_writable(path.resolve().parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON under another name, then give it its own: the file is whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
