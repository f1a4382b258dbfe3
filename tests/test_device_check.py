"""The device check: what of it can run on a CPU does, and without a device it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.device_model import deviations
from benchmarks.device_parts import PARTS, NotHere

ROOT = Path(__file__).parent.parent
NOT_ON_A_CPU = {"probe_values", "offload_stress"}


# Dynamo looks at `.grad` of what it traces and hides the warning, which here is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_passes_on_a_cpu_or_says_what_it_lacks(part: str) -> None:
    device = torch.device("cpu")
    if part in NOT_ON_A_CPU:
        with pytest.raises(NotHere, match="no CUDA device"):
            PARTS[part](device)
        return
    if part == "quantized":
        pytest.importorskip("bitsandbytes")
    figures = PARTS[part](device)
    assert figures["ok"], figures


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    """Also where rematic is not installed: it makes its own tree of links."""
    command = [sys.executable, str(ROOT / "benchmarks" / "device_check.py")]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"part": "start", "skipped": "torch finds no CUDA device"}


def test_where_plain_steps_agree_every_bit_counts() -> None:
    one, other = {"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0 + 2**-23])}
    assert deviations(one, one, one) == []
    assert deviations(other, one, one) == ["a"]
    assert deviations({"a": torch.tensor([-0.0])}, {"a": torch.zeros(1)}, {"a": torch.zeros(1)})


def test_where_they_do_not_the_spread_does() -> None:
    plain, again = {"a": torch.tensor([1.0])}, {"a": torch.tensor([1.25])}
    assert deviations({"a": torch.tensor([2.0])}, plain, again) == []
    assert deviations({"a": torch.tensor([2.1])}, plain, again) == ["a"]


def test_what_is_missing_or_new_deviates() -> None:
    assert deviations({}, {"a": torch.zeros(1)}, {"a": torch.zeros(1)}) == ["a"]
