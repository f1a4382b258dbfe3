"""Kills trainings at random moments; each leaves a readable journal and resumes as it was.

    python benchmarks/killed_runs.py                   # 20 trials, about two minutes
    python benchmarks/killed_runs.py --trials 100 --json

A child process trains a small model, changes its policy on the way, and saves a checkpoint after
each optimizer step. It is killed by SIGKILL; then its journal is read and audited, the checkpoint
is loaded into a new session, and the training goes on in the same journal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rematic
from rematic.control import audit
from rematic.journal import FILE_NAME, JournalWriter, read_journal
from rematic.recipes import GoalsConfig, Recipe

PART_BYTES = 20_000
"""Small, so that some of the runs die while a part of the journal is closed."""

CHANGES = {2: "recompute", 5: "selective", 9: "keep", 14: "recompute"}
"""The policies that the child switches to, by step; then again from the first on."""


class Training:
    """A small model that trains with a journal and checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        self.model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.folder = folder
        self.journal = JournalWriter(folder / FILE_NAME, part_bytes=PART_BYTES)
        self.session = rematic.attach(
            self.model,
            self.optimizer,
            policy="keep",
            recipe=Recipe(goals=GoalsConfig(slowdown_max=1e9)),
            journal=self.journal,
        )

    def step(self) -> None:
        """Trains one batch, changes the policy where it is due, and saves."""
        policy = CHANGES.get(self.session.num_steps % 20)
        if policy is not None:
            self.session.switch(policy)
        with self.session.step(torch.ones(4, 16)):
            self.model(torch.ones(4, 16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = {"session": self.session.state_dict(), "policy": self.session.policy.name}
        torch.save(state, self.folder / "new.ckpt")
        os.replace(self.folder / "new.ckpt", self.folder / "last.ckpt")

    def close(self) -> None:
        """Ends it in order."""
        self.session.detach()
        self.journal.close()


def train_until_killed(folder: Path) -> None:
    """What the child does."""
    torch.set_num_threads(1)
    training = Training(folder)
    while True:
        training.step()


def run_trial(folder: Path, *, delay_seconds: float) -> dict[str, Any]:
    """Trains, kills, reads, resumes; returns what was found.

    Raises:
        AssertionError: If the journal or the resumed session is not what it should be.
    """
    # Forked from a process that has loaded torch and done nothing with it: no threads are lost.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rematic"])
    child = context.Process(target=train_until_killed, args=(folder,))
    child.start()
    while not (folder / "last.ckpt").exists():
        time.sleep(0.002)
        assert child.is_alive(), "the child died by itself"
    time.sleep(delay_seconds)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    num_killed = _read(folder)
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    training = Training(folder)
    training.session.load_state_dict(saved["session"])
    resumed = training.session.policy.name
    assert resumed == saved["policy"] == _policy_at(folder, training.session.num_steps)
    for _ in range(3):
        training.step()
    training.close()
    return {
        "steps_when_killed": num_killed,
        "steps_in_the_end": _read(folder),
        "policy": resumed,
        "parts": len(list(folder.glob("journal.*.jsonl"))),
    }


def _read(folder: Path) -> int:
    """Reads and audits the journal; returns the number of steps in it."""
    report = audit(read_journal(folder / FILE_NAME))
    assert report.differences == (), report.differences[:3]
    assert report.num_unaudited == 0
    return report.num_steps


def _policy_at(folder: Path, num_steps: int) -> str:
    """Returns the policy of the last of so many steps, by the journal."""
    policy = "keep"
    for event in read_journal(folder / FILE_NAME):
        if event["event"] == "switch" and int(str(event["step"])) < num_steps:
            policy = str(event["to"])
    return policy


def main() -> None:
    """Runs the trials and prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw, rows = random.Random(arguments.seed), []
    for _ in range(arguments.trials):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_trial(Path(folder), delay_seconds=draw.uniform(0, 0.6)))
    if arguments.json:
        print(json.dumps({"trials": len(rows), "failed": 0, "rows": rows}, indent=2))
        return
    steps = [row["steps_when_killed"] for row in rows]
    print(
        f"{len(rows)} runs killed after {min(steps)} to {max(steps)} steps: every journal readable "
        "and without differences, every run resumed under the policy it had"
    )


if __name__ == "__main__":
    main()
