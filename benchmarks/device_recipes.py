"""Trains small recipes on a device as `rematic train` does: packed weights, packing, optimizers."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SIZES = (
    "model.config.hidden_size=128",
    "model.config.intermediate_size=256",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=4",
    "data.max_documents=4",
    "data.max_length=128",
    "training.learning_rate=0.01",
    "memory.heap_cap=false",
)
BF16 = ("model.dtype=bf16", "training.precision=bf16")
WAYS: Mapping[str, tuple[str, ...]] = {
    "qlora": (*BF16, "tuning.method=qlora", "training.optimizer=paged-adamw-8bit"),
    "int8": (*BF16, "tuning.method=lora", "quantization.format=int8"),
    "packed": (*BF16, "data.packing=true", "training.optimizer=adafactor"),
    "tiled": ("model.config.vocab_size=40000", "evaluation.holdout=0.2"),
}
"""What is trained; each way touches kernels that the others do not."""


def train_ways(device: torch.device) -> dict[str, Any]:
    """Trains each way and returns its steps, losses and peak.

    Raises:
        ModuleNotFoundError: A library of the extra `train` is missing.
    """
    from rematic.recipes import load_recipe
    from rematic.training.run import train

    budget = "256MiB" if device.type == "cpu" else "auto"
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, overrides in WAYS.items():
            told = [*SIZES, f"memory.budget={budget}", f"run.dir={folder}", f"run.name={way}"]
            summary = train(load_recipe("tiny-cpu", [*told, *overrides]), show_progress=False)
            text = (Path(folder) / way / "metrics.jsonl").read_text()
            losses = [json.loads(line)["loss"] for line in text.splitlines()]
            rows[way] = {"steps": summary.steps, "losses": losses}
    ok = all(math.isfinite(loss) for row in rows.values() for loss in row["losses"])
    learns = all(row["losses"][-1] < row["losses"][0] for row in rows.values())
    return {"ok": ok and learns, "ways": rows}
