"""benchmarks/recipe_figures.py writes what it finds into a recipe, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recipe_figures
from rematic.recipes import FiguresConfig, load_recipe
from rematic.training.data import load_data

_RECIPE = (
    "# Purpose: to be measured.\n"
    "# Measured: on some day, on a machine with\n"
    "#   a long name; see measured_on.\n"
    "# Does not work: nowhere.\n"
    "training: {seed: 1} # kept\n"
    "\n"
    "measured_on:\n"
    "  device: cpu\n"
    "  peak: 1GiB\n"
)


def test_figures_and_where_they_are_from_are_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_figures, "ROOT", tmp_path)
    path = tmp_path / "recipes" / "one.yaml"
    path.parent.mkdir()
    path.write_text(_RECIPE, encoding="utf-8")
    figures = FiguresConfig(device="cpu", peak="2GiB", tokens_per_second=3.0)
    for _ in range(2):  # the second time nothing changes
        recipe_figures.write_section("one", "measured_on", figures)
        recipe_figures.write_measured_line("one", "today, here")
    text = path.read_text("utf-8")
    assert text.splitlines()[1:3] == [
        "# Measured: today, here; see measured_on.",
        "# Does not work: nowhere.",
    ]
    assert "training: {seed: 1} # kept" in text
    assert load_recipe(path).measured_on == figures


def test_a_header_without_the_line_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("no line that begins with '# Measured: '")):
        recipe_figures.with_measured_line("# Purpose: none.\n", "today")


def test_a_run_is_measured_by_what_its_processes_did() -> None:
    recipe = load_recipe("tiny-cpu-ddp", ["data.max_documents=5", "data.max_length=64"])
    first, every = recipe_figures.tokens_of_ranks(recipe)
    loaders = [load_data(recipe, rank=rank, num_ranks=2).loader for rank in range(2)]
    assert every == [sum(batch["input_ids"].numel() for batch in one) for one in loaders]
    assert len(first) == 2
    assert all(0 < one < all_of_it for one, all_of_it in zip(first, every, strict=True))


def test_the_time_of_processes_that_are_left_behind_counts() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}])"
    code = (
        "import subprocess, sys\n"
        "from benchmarks.recipe_figures import _cpu_seconds_of_children, _every_descendant_counts\n"
        "with _every_descendant_counts():\n"
        f"    subprocess.run([sys.executable, '-c', {leaves!r}], check=True)\n"
        "print(_cpu_seconds_of_children())\n"
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.3
