"""An adapter over 4-bit weights, trained in a heap that the operating system caps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rematic.memory import glibc
from rematic.recipes import load_recipe
from rematic.training.environment import training_environment
from rematic.training.model_config import build_config
from rematic.training.prepared_model import base_model
from tests.training import capped_adapter

RECIPE = (
    "tiny-cpu-qlora",
    "tuning.r=4",
    "model.config.num_hidden_layers=6",
    "data.max_documents=2",
    "data.max_length=512",
    "training.threads=1",
    "memory.budget=48MiB",
)
KEPT = ("policy.start=keep", "control.adapt=false", "policy.op_retry=never", "control.attempts=1")

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or glibc.read_heap() is None,
        reason="the cap needs Linux with glibc 2.33",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, capped_adapter.__file__, "answers.pt", *RECIPE, *overrides]
    done = subprocess.run(
        command, cwd=folder, env=training_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_trained_where_everything_kept_does_not_fit(tmp_path: Path) -> None:
    from peft import PeftModel

    assert "can't allocate memory" in run(tmp_path, *KEPT, "run.name=kept")["error"]
    found = run(tmp_path)
    assert found["steps"] == 2
    assert found["limits"][0] > 0  # RLIMIT_DATA, in bytes
    recipe = load_recipe(RECIPE[0], RECIPE[1:])
    base = base_model(recipe, config=build_config(recipe.model, max_length=512))
    folder = tmp_path / "runs" / found["name"] / "adapter"
    again = PeftModel.from_pretrained(base, folder).eval()
    # (as many threads as there: sums of another number are taken in another order)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            logits = again(input_ids=capped_adapter.QUESTION, use_cache=False).logits
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(logits, torch.load(tmp_path / "answers.pt", weights_only=True))
