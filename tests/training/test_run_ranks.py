"""Runs of several processes, started as a person starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rematic.recipes import load_recipe
from rematic.training.environment import training_environment
from rematic.training.run import train
from tests.training.small import TINY

QLORA = ("tuning.method=qlora", "tuning.r=4", "quantization.compute_dtype=fp32")
WAYS = {
    "ddp": ("distributed.strategy=ddp", "tuning.method=lora", "tuning.r=4"),
    "fsdp2": ("distributed.strategy=fsdp2", *QLORA, "quantization.storage_dtype=fp32"),
}
DATA = ("data.max_documents=8", "run.save=adapter", "training.learning_rate=0.01")


def start(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rematic.cli", "train", "tiny-cpu", *TINY, *DATA, *overrides]
    return subprocess.run(
        command, cwd=folder, env=training_environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_what_one_does_with_two_micro_batches(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = start(tmp_path, *WAYS[way], "distributed.devices=2", "run.name=two", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4  # printed once
    num_epochs = 1
    if way == "ddp":  # and goes on
        num_epochs = 2
        more = ("distributed.devices=2", "run.name=two", "training.epochs=2", "--resume")
        done = start(tmp_path, *WAYS[way], *more, "runs/two")
        assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    alone = [one for one in WAYS[way] if not one.startswith("distributed")]
    alone += ["training.accumulate=2", "run.name=one", f"training.epochs={num_epochs}"]
    train(load_recipe("tiny-cpu", [*TINY, *DATA, *alone]), show_progress=False)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["one", "two"]
    assert {path.name for path in Path("runs/two").iterdir()} == {
        "adapter",
        "journal.jsonl",
        "last.ckpt",
        "metrics.jsonl",
        "recipe.yaml",
    }
    lines = Path("runs/two/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4 * num_epochs
    two, one = (
        load_file(Path("runs") / name / "adapter" / "adapter_model.safetensors")
        for name in ("two", "one")
    )
    assert two.keys() == one.keys() != set()
    for name, value in two.items():
        assert torch.allclose(value, one[name], rtol=1e-3, atol=1e-5), name
