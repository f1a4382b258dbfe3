"""The command line of Lightning as users run it: a process, with arguments or a YAML file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_cli.py"
LOSS = re.compile(r"loss ([0-9.]+)")
RECIPE = "policy: {start: recompute}\nmemory: {budget: 20GiB}\n"
QUIET = "enable_model_summary: false, logger: false"


@pytest.mark.timeout(180)
def test_by_arguments_and_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(RECIPE, "utf-8")
    trainer = f"accelerator: cpu, devices: 1, max_epochs: 1, enable_checkpointing: false, {QUIET}"
    (tmp_path / "plain.yaml").write_text(f"trainer: {{{trainer}}}\n", "utf-8")
    strategy = "{class_path: rematic.RecomputeStrategy, init_args: {recipe: long.yaml}}"
    (tmp_path / "ours.yaml").write_text(f"trainer: {{{trainer}, strategy: {strategy}}}\n", "utf-8")
    ours = ["--trainer.strategy", "rematic.RecomputeStrategy"]
    runs = {
        "arguments": ["--config", "plain.yaml", *ours, "--trainer.strategy.recipe", "long.yaml"],
        "file": ["--config", "ours.yaml"],
    }
    processes = {
        name: subprocess.Popen(
            [sys.executable, str(EXAMPLE), "fit", "--model.longest", "64", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "300"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, arguments in runs.items()
    }
    outputs = {name: process.communicate(timeout=150)[0] for name, process in processes.items()}
    codes = {name: process.returncode for name, process in processes.items()}
    assert codes == {"arguments": 0, "file": 0}, outputs
    for output in outputs.values():  # in the progress bar
        assert "policy: recompute" in output
        assert " of 20.0 GiB" in output
    losses = {name: LOSS.findall(output) for name, output in outputs.items()}
    assert losses["arguments"] == losses["file"]
    assert len(set(losses["file"])) == 8
