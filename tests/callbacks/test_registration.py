"""Importing `rematic.callbacks` registers names and does nothing else."""

from __future__ import annotations

import importlib
import subprocess
import sys

from lightning.pytorch.strategies import StrategyRegistry

import rematic
import rematic.callbacks

REPORT = """
import torch, lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import StrategyRegistry
state = torch.get_rng_state(), torch.get_num_threads(), vars(pl.Trainer).copy()
before = set(StrategyRegistry)
import rematic.callbacks
assert torch.equal(state[0], torch.get_rng_state())
assert state[1:] == (torch.get_num_threads(), vars(pl.Trainer).copy())
print(sorted(set(StrategyRegistry) - before))
"""


def test_in_a_fresh_process_names_are_added_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPORT], capture_output=True, text=True, check=True, timeout=120
    )
    names = ["recompute", "recompute_ddp", "recompute_fsdp", "recompute_fsdp2"]
    assert done.stdout.splitlines() == [str(names)]


def test_importing_again_changes_nothing() -> None:
    before = {name: dict(entry) for name, entry in StrategyRegistry.items()}
    importlib.reload(rematic.callbacks)
    assert {name: dict(entry) for name, entry in StrategyRegistry.items()} == before
    assert StrategyRegistry["recompute"]["strategy"] is rematic.RecomputeStrategy


def test_the_name_makes_the_strategy() -> None:
    assert type(StrategyRegistry.get("recompute")) is rematic.RecomputeStrategy
