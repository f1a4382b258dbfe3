"""The line that an out-of-memory error names is one of the code that was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rematic.activations import OpRetry
from rematic.step_failure import read_failure

SCRIPT = """
def step(around):
    with around:
        return torch.empty(1 << 52)
"""


@pytest.mark.parametrize("folder", ["work", "rematic", "torch", "torch/rematic"])
def test_a_failure_names_the_line_of_a_script_in_any_folder(folder: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(compile(SCRIPT, str(tmp_path / folder / "train.py"), "exec"), names)
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        names["step"](OpRetry(lambda asked, where: 0))
    # The test's own lines are outside of rematic too, but further out.
    assert read_failure(caught.value, 1).where == "train.py:4 in step"
