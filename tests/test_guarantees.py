"""The page of guarantees names tests that exist."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@cache
def names_in(path: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"^def (test_\w+)", text, re.M)


def test_every_named_test_exists() -> None:
    assert len(NAMED) == PAGE.count("tests/") > 30
    missing = [f"{path}::{name}" for path, name in NAMED if name not in names_in(path)]
    assert not missing


def test_every_statement_of_a_table_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    statements = [row for row in rows if not row.startswith(("| what |", "|---"))]
    assert len(statements) > 20
    assert not [row for row in statements if "::test_" not in row]
