"""Trains a recipe under a heap cap in a process of its own, and asks the model before it is gone.

The first argument is the file for the answers, the others make the recipe.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from rematic.memory import use_mapping_malloc

QUESTION = torch.arange(3, 103)[None]


def main(argv: list[str]) -> None:
    use_mapping_malloc()
    from rematic.recipes import load_recipe
    from rematic.training import fit, heap_cap
    from rematic.training.run import train

    answers, name, *overrides = argv
    save, start = fit.save_weights, heap_cap.HeapCap.on_train_start
    limits: list[int] = []

    def ask_first(recipe: Any, model: Any, folder: Path, **options: Any) -> list[Path]:
        model.eval()
        with torch.no_grad():
            torch.save(model(input_ids=QUESTION, use_cache=False).logits, answers)
        return save(recipe, model, folder, **options)

    def note_limit(self: heap_cap.HeapCap, *arguments: Any) -> None:
        start(self, *arguments)
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])

    fit.save_weights = ask_first
    heap_cap.HeapCap.on_train_start = note_limit  # type: ignore[method-assign]
    try:
        summary = train(load_recipe(name, overrides), show_progress=False)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"name": summary.name, "steps": summary.steps, "limits": limits}))


if __name__ == "__main__":
    main(sys.argv[1:])
