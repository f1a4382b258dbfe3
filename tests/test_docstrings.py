"""The examples in docstrings show what the code does."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"rematic": "plugin", "rematic.callbacks": "callbacks", "rematic.recipes": "recipes"}


def modules_with_examples() -> Iterator[str]:
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text("utf-8"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join([package, *(part for part in parts if part != "__init__")])


@pytest.mark.parametrize("module", list(modules_with_examples()))
def test_examples_give_what_they_show(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0, "the report of doctest is in the captured output"
