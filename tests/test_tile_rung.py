"""The attempt in slices: what fits by it alone, where it is allowed, and where it is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.memory import SimulatedProbe
from rematic.policy import Recompute, RecomputeOffload
from tests.activations.test_token_wise_parts import MLP, WIDTH, Block, make, x
from tests.events import Events

ATTEMPTS = 8


class Mix(nn.Module):
    """Nothing in it is token-wise but single ops."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * WIDTH)
        self.down = nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)).cumsum(1) / x.shape[1])


class Outcome:
    """The last of some steps, which alone is under a budget."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        *,
        budget_bytes: int | None = None,
        action: Any = None,
        allow_tile: bool = False,
        num_steps: int = 2,
        attempts: int = ATTEMPTS,
    ) -> None:
        model, self.journal, probe = make(block), Events(), SimulatedProbe()
        session = rematic.attach(
            model,
            policy="keep" if action is None else action.name,
            probe=probe,
            journal=self.journal,
            recipe={
                "policy": {"op_retry": "never", "allow_tile": allow_tile},
                "control": {"attempts": attempts},
            },
        )

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = model(batch).pow(2).mean()
            loss.backward()
            return loss.detach()

        self.error: rematic.StepOutOfMemoryError | None = None
        with probe:
            probe.track(model.parameters())
            for _ in range(num_steps - 1):
                session.run(step, x())
                model.zero_grad()
            probe.reset_peak()
            probe.budget_bytes = budget_bytes
            try:
                self.loss = session.run(step, x())
            except rematic.StepOutOfMemoryError as error:
                self.error = error
        self.peak_bytes = probe.peak_allocated_bytes
        self.gradients = [parameter.grad for parameter in model.parameters()]
        session.detach()

    def attempts(self) -> list[str]:
        return [e["next"] for e in self.journal.of("retry") if e["level"] == "step"]


def tight(block: Callable[[], nn.Module]) -> int:
    """Returns a budget well below what the heaviest lossless plan needs."""
    needed = min(Outcome(block, action=action).peak_bytes for action in HEAVY)
    return needed * 2 // 3


HEAVY = (Recompute(), RecomputeOffload())


@pytest.mark.parametrize("num_steps", [1, 2], ids=["the first step", "a later step"])
@pytest.mark.parametrize("block", [MLP, Block])
def test_a_budget_that_slices_alone_meet(block: Callable[[], nn.Module], num_steps: int) -> None:
    """The peak is the inside of one unit in its backward, which no plan makes smaller."""
    wanted, budget = Outcome(block), tight(block)
    found = Outcome(block, budget_bytes=budget, allow_tile=True, num_steps=num_steps)
    assert found.error is None
    assert found.attempts()[-2:] == ["offload", "tile"]
    assert found.peak_bytes <= budget
    torch.testing.assert_close(found.loss, wanted.loss)
    for gradient, other in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(gradient, other)
    retries = [e for e in found.journal.of("retry") if e["level"] == "step"]
    assert [e["next"] for e in retries if e["lossy"]] == ["tile"]
    notices = [e["text"] for e in found.journal.of("notice") if e["kind"] == "tile"]
    assert any("gradients of its weights are summed by slice" in text for text in notices)


def test_without_permission_the_report_names_the_key() -> None:
    found = Outcome(Block, budget_bytes=tight(Block))
    assert found.error is not None
    assert found.attempts()[-1] == "offload"
    assert "`policy: {allow_tile: true}` permits MLPs and norms in slices" in str(found.error)
    assert all(gradient is None for gradient in found.gradients)


def test_where_nothing_is_token_wise_no_attempt_is_wasted() -> None:
    found = Outcome(Mix, budget_bytes=tight(Mix), allow_tile=True)
    assert found.error is not None
    assert found.attempts()[-1] == "offload"
    assert "allow_tile" not in str(found.error)


def test_the_lossless_attempt_before_it_is_always_made() -> None:
    found = Outcome(Block, budget_bytes=tight(Block), allow_tile=True, attempts=3)
    assert found.error is None
    assert found.attempts() == ["offload", "tile"]


def test_a_permission_that_is_not_used_changes_no_bit() -> None:
    """A lossless plan fits, and parts that are asked take no room."""
    needed = Outcome(Block, action=Recompute()).peak_bytes
    wanted = Outcome(Block)
    found = Outcome(Block, budget_bytes=needed * 11 // 10, allow_tile=True)
    assert found.error is None
    assert found.attempts() == Outcome(Block, budget_bytes=needed * 11 // 10).attempts() != []
    assert torch.equal(found.loss, wanted.loss)
    for gradient, other in zip(found.gradients, wanted.gradients, strict=True):
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other)
