"""While a training is saved, everything is as behind its last optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.at_stop import NotSavedError
from rematic.recipes import ControlConfig, PolicyConfig, Recipe
from rematic.supervisor import RunStoppedError
from tests.test_supervisor import CRAMPED, STUCK, Run


class Net(nn.Module):
    """Counts in a buffer, in a large one and in batch norm, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("large", torch.zeros(1 << 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:  # a first change would be no step that can be repeated
            self.large += 1
        return self.norm(self.blocks(x) * torch.rand(()))


class Loop:
    """Two micro-batches an update, in a session whose failed ops and units are not retried."""

    def __init__(self, *, momentum: float = 0.0) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.sgd = torch.optim.SGD(self.net.parameters(), 0.1, momentum=momentum)
        recipe = Recipe(policy=PolicyConfig(op_retry="never", trust=("*",)))
        self.session = rematic.attach(self.net, self.sgd, policy="keep", recipe=recipe)
        self.session.at_stop = self.save
        self.saved: dict[str, Any] = {}
        self.fails = False

    def save(self, report: Any) -> str:
        self.saved = self.state()
        return "saved"

    def state(self) -> dict[str, Any]:
        return {
            "weights": {k: v.clone() for k, v in self.net.state_dict().items()},
            "generator": torch.get_rng_state(),
            "steps": self.session.num_steps,
        }

    def micro_batch(self) -> None:
        def step(x: torch.Tensor) -> None:
            loss = self.net(x).sum()
            if self.fails:
                raise torch.OutOfMemoryError("injected")
            loss.backward()

        self.session.run(step, torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))

    def update(self, *, to_none: bool = True) -> None:
        self.sgd.step()
        self.sgd.zero_grad(set_to_none=to_none)

    def stop(self) -> Any:
        self.fails = True
        with pytest.raises(rematic.StepOutOfMemoryError) as caught:
            self.micro_batch()
        return caught.value.report


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    names = first["weights"].keys()
    return (
        all(torch.equal(first["weights"][n], second["weights"][n]) for n in names)
        and torch.equal(first["generator"], second["generator"])
        and first["steps"] == second["steps"]
    )


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_what_is_saved_is_as_before_the_update(done: int, to_none: bool) -> None:
    loop = Loop()
    for _ in range(3):
        loop.micro_batch()
        loop.micro_batch()
        loop.update(to_none=to_none)
    behind = loop.state()
    for _ in range(done):
        loop.micro_batch()
    before = loop.state()
    report = loop.stop()
    assert same(loop.saved, behind)
    assert same(loop.state(), before)
    assert (report.checkpoint, report.num_unsaved_steps) == ("saved", done)


def test_gradients_that_a_scaler_has_dropped_begin_an_update() -> None:
    loop = Loop()
    loop.micro_batch()
    loop.update()
    loop.micro_batch()
    loop.sgd.zero_grad()  # and no step
    behind = loop.state()
    assert loop.stop().num_unsaved_steps == 0
    assert same(loop.saved, behind)


def test_an_optimizer_that_steps_inside_leaves_nothing_to_go_back_to() -> None:
    loop = Loop()
    loop.micro_batch()
    loop.update()
    loop.micro_batch()

    def step(x: torch.Tensor) -> None:
        loop.net(x).sum().backward()
        loop.sgd.step()
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(rematic.StepOutOfMemoryError, match="an optimizer has stepped") as caught:
        loop.session.run(step, torch.ones(3, 4))
    assert caught.value.report.num_unsaved_steps == 0
    assert same(loop.saved, loop.state())


@pytest.mark.parametrize(
    ("save", "said"),
    [
        (None, "The training could not be saved (`session.at_stop` is not set)."),
        (NotSavedError("no need"), "The training could not be saved (no need)."),
        (OSError("disk full"), "The training could not be saved (OSError: disk full)."),
    ],
    ids=["nobody", "refused", "failed"],
)
def test_why_nothing_was_saved(save: Exception | None, said: str) -> None:
    loop = Loop()

    def fails(report: Any) -> str:
        assert save is not None
        raise save

    loop.session.at_stop = None if save is None else fails
    loop.fails = True
    with pytest.raises(rematic.StepOutOfMemoryError) as caught:
        loop.micro_batch()
    assert said in str(caught.value)


def test_the_text_says_what_comes_again() -> None:
    loop = Loop()
    loop.micro_batch()
    loop.fails = True
    said = r"saved to saved, as it was behind the last optimizer step: 1 micro-batches since then"
    with pytest.raises(rematic.StepOutOfMemoryError, match=said):
        loop.micro_batch()


def test_a_person_is_asked_between_updates() -> None:
    """No gradients of micro-batches that are done are lost for a question."""
    run = Run(recipe=Recipe(control=ControlConfig(escalation="checkpoint_and_stop")), **STUCK)
    reports: list[Any] = []
    run.session.at_stop = reports.append
    run.probe.says = CRAMPED
    with pytest.raises(RunStoppedError):
        run.steps(9, micro_batches=3)
    asked = [e["step"] for e in run.journal.of("decision") if e["person"]]
    assert asked == [9], "after the first micro-batch of the fourth update"
    assert run.session.num_steps == 12
    assert [report.num_unsaved_steps for report in reports] == [0]
