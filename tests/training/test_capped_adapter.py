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
from rematic.training.data import load_data
from rematic.training.environment import training_environment
from rematic.training.model_config import build_config
from rematic.training.prepared_model import base_model
from tests.training import capped_adapter

RECIPE = (
    "tiny-cpu-qlora",
    "tuning.r=4",
    "model.config.num_hidden_layers=4",
    "data.max_documents=30",
    "data.max_length=700",
    "data.overlong=skip",
    "training.threads=1",
    "memory.budget=56MiB",
)
KEPT = (
    "run.name=kept",
    "policy.start=keep",
    "control.adapt=false",
    "policy.op_retry=never",
    "control.attempts=1",
)

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or glibc.read_heap() is None,
        reason="the cap needs Linux with glibc 2.33",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def runs(folder: Path, *overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    """What several runs found, each with its own overrides."""
    command = [sys.executable, capped_adapter.__file__, "answers.pt", json.dumps(overrides)]
    done = subprocess.run(
        [*command, *RECIPE],
        cwd=folder,
        env=training_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_trained_where_everything_kept_does_not_fit(tmp_path: Path) -> None:
    from peft import PeftModel

    kept, found = runs(tmp_path, KEPT, ())
    # torch's error, or Python's own
    assert "can't allocate memory" in kept["error"] or "MemoryError" in kept["error"]
    recipe = load_recipe(RECIPE[0], RECIPE[1:])
    lengths = [batch["input_ids"].shape[1] for batch in load_data(recipe).loader]
    assert found["steps"] == len(lengths) >= 8
    assert max(lengths) > 2 * min(lengths)
    assert found["limits"][0] > 0  # RLIMIT_DATA, in bytes
    assert found["late"] == []  # modules imported under the cap, whose bytes batches would lack
    base = base_model(recipe, config=build_config(recipe.model, max_length=700))
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
