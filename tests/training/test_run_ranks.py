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
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_what_one_does_with_two_micro_batches(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = start(tmp_path, *WAYS[way], "distributed.devices=2", "run.name=two", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4  # printed once
    monkeypatch.chdir(tmp_path)
    alone = [one for one in WAYS[way] if not one.startswith("distributed")]
    recipe = load_recipe(
        "tiny-cpu", [*TINY, *DATA, *alone, "training.accumulate=2", "run.name=one"]
    )
    train(recipe, show_progress=False)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["one", "two"]
    assert {path.name for path in Path("runs/two").iterdir()} == {
        "adapter",
        "journal.jsonl",
        "last.ckpt",
        "metrics.jsonl",
        "recipe.yaml",
    }
    two, one = (
        load_file(Path("runs") / name / "adapter" / "adapter_model.safetensors")
        for name in ("two", "one")
    )
    assert two.keys() == one.keys() != set()
    for name, value in two.items():
        assert torch.allclose(value, one[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_resume(tmp_path: Path) -> None:
    ddp = (*WAYS["ddp"], "distributed.devices=2", "tuning.dropout=0.2")
    assert start(tmp_path, *ddp, "training.epochs=2", "run.name=whole").returncode == 0
    assert start(tmp_path, *ddp, "run.name=parts").returncode == 0
    done = start(tmp_path, *ddp, "training.epochs=2", "run.name=parts", "--resume", "runs/parts")
    assert done.returncode == 0, done.stderr
    whole, parts = (
        load_file(tmp_path / "runs" / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    )
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
