"""Trains a recipe under a heap cap, and asks the model before it is gone.

Arguments: the file for the answers, a list of runs as JSON (the overrides of each), the recipe and
overrides of all. Each run is a process of its own, forked when the libraries are there.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401
import peft  # noqa: F401
import torch

from rematic.memory import use_mapping_malloc
from rematic.recipes import load_recipe
from rematic.training import fit, heap_cap
from rematic.training.run import train

QUESTION = torch.arange(3, 103)[None]


def main(argv: list[str]) -> None:
    answers, runs, name, *overrides = argv
    for more in json.loads(runs):
        child = os.fork()
        if child == 0:
            print(json.dumps(found_in_run(answers, name, [*overrides, *more])), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def found_in_run(answers: str, name: str, overrides: list[str]) -> dict[str, Any]:
    use_mapping_malloc()
    save, start = fit.save_weights, heap_cap.HeapCap.on_train_start
    limits: list[int] = []
    known: set[str] = set()
    late: set[str] = set()

    def ask_first(recipe: Any, model: Any, folder: Path, **options: Any) -> list[Path]:
        late.update(set(sys.modules) - known)
        model.eval()
        with torch.no_grad():
            torch.save(model(input_ids=QUESTION, use_cache=False).logits, answers)
        return save(recipe, model, folder, **options)

    def note_limit(self: heap_cap.HeapCap, *arguments: Any) -> None:
        start(self, *arguments)
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
        known.update(sys.modules)

    fit.save_weights = ask_first
    heap_cap.HeapCap.on_train_start = note_limit  # type: ignore[method-assign]
    try:
        summary = train(load_recipe(name, overrides), show_progress=False)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"name": summary.name, "steps": summary.steps, "limits": limits, "late": sorted(late)}


if __name__ == "__main__":
    main(sys.argv[1:])
