"""A device on paper: what steps take under each policy, and a controller that drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rematic.control.controller import decide
from rematic.control.controller_state import ControllerState, Decision
from rematic.control.goals import ControlRules
from rematic.control.observation import Observation

LADDER = ("keep", "selective", "recompute", "recompute+offload")
BYTES_PER_TOKEN = {"keep": 8, "selective": 5, "recompute": 2, "recompute+offload": 1, "planned": 4}
SECONDS_PER_TOKEN = {
    "keep": 1.0,
    "selective": 1.1,
    "recompute": 1.3,
    "recompute+offload": 1.6,
    "planned": 1.0,
}
CAPACITY = 10_000

Figures = Callable[[int, str], dict[str, Any]]
"""What differs from a quiet step, by step and policy; `tokens` is among it."""


@dataclass
class World:
    """Runs a controller; what it decides is in force from the next step on."""

    figures: Figures
    policy: str = "keep"
    rules: ControlRules = field(default_factory=lambda: ControlRules(ladder=LADDER))
    state: ControllerState = field(default_factory=ControllerState)
    stack: list[str] = field(default_factory=list)
    pinned: bool = False
    step: int = 0
    seen: list[Observation] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def observe(self) -> Observation:
        given = {"tokens": 500, **self.figures(self.step, self.policy)}
        tokens = given["tokens"]
        peak = 1000 + BYTES_PER_TOKEN.get(self.policy, 3) * tokens
        quiet: dict[str, Any] = {
            "step": self.step,
            "length": tokens,
            "seconds": tokens * SECONDS_PER_TOKEN.get(self.policy, 1.0),
            "policy": self.policy,
            "pinned": self.pinned,
            "depth": len(self.stack),
            "limit_bytes": CAPACITY,
            "peak_bytes": peak,
            "in_use_bytes": 1000,
            "reserved_bytes": min(peak, CAPACITY),
            "hole_bytes": 0,
            "capacity_bytes": CAPACITY,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }
        return Observation(**{**quiet, **given})

    def run(self, steps: int) -> World:
        for _ in range(steps):
            seen = self.observe()
            self.state, decision = decide(self.state, seen, self.rules)
            self.seen.append(seen)
            self.decisions.append(decision)
            self.step += 1
            if decision.change == "switch":
                self.switch(decision.policy)
            elif decision.change == "rollback":
                self.rollback()
        return self

    def switch(self, policy: str) -> None:
        self.stack.append(self.policy)
        self.policy = policy

    def rollback(self) -> None:
        self.policy = self.stack.pop()

    def story(self) -> list[str]:
        """What was done, step by step: `12 switch to selective`."""
        told = []
        for seen, decision in zip(self.seen, self.decisions, strict=True):
            if decision.change == "switch":
                told.append(f"{seen.step} switch to {decision.policy}")
            elif decision.change == "rollback":
                missed = "+".join(gate.name for gate in decision.gates if gate.passed is False)
                told.append(f"{seen.step} back to {decision.policy} for {missed}")
            elif decision.gates and decision.rule.endswith("has met its goals"):
                told.append(f"{seen.step} {seen.policy} met its goals")
            elif decision.gates:
                missed = "+".join(gate.name for gate in decision.gates if gate.passed is False)
                told.append(f"{seen.step} drift of {missed}")
            if decision.release:
                told.append(f"{seen.step} release")
            if decision.person:
                told.append(f"{seen.step} ask")
        return told

    def settled(self) -> list[str]:
        """The verdicts that held, each once for as long as it did."""
        verdicts: list[str] = []
        for decision in self.decisions:
            if verdicts[-1:] != [decision.settled]:
                verdicts.append(decision.settled)
        return verdicts


def constant(**figures: Any) -> Figures:
    return lambda step, policy: dict(figures)


def lengths(*parts: tuple[int, int]) -> Figures:
    """Stretches of (steps, tokens); the last one goes on."""

    def figures(step: int, policy: str) -> dict[str, Any]:
        for steps, tokens in parts:
            if step < steps:
                return {"tokens": tokens}
            step -= steps
        return {"tokens": parts[-1][1]}

    return figures


def cycle(tokens: Sequence[int]) -> Figures:
    return lambda step, policy: {"tokens": tokens[step % len(tokens)]}
