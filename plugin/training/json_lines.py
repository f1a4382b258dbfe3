"""Files with one JSON object a line, beside the journal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


def append_line(path: Path, values: Mapping[str, object]) -> None:
    """Appends an object; a number that JSON lacks becomes a word, as in the journal.

    Args:
        path: The file.
        values: Text, numbers, truth values and None.
    """
    spelled = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(spelled, allow_nan=False) + "\n")
