"""A batch that is run under two policies leaves what it leaves when it is run once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rematic
from rematic.gradient_sample import GradientSample
from rematic.memory import SimulatedProbe
from tests.hosts.accelerate_loops import WIDTH, Faults, Net
from tests.hosts.lightning_fits import Recorded

NUM_STEPS = 8


def gradients(
    session: rematic.Session | None, model: torch.nn.Module, *, accumulate: int
) -> list[torch.Tensor]:
    """Returns loss and gradients of each micro-batch; switches the policy before the fourth."""
    generator = torch.Generator().manual_seed(5)
    found: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    torch.manual_seed(4)
    for number in range(NUM_STEPS):
        x = torch.randn(8, WIDTH, generator=generator)
        found.append(fn(x) if session is None else session.run(fn, x))
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if session is not None and number == 3:
            session.switch("recompute")
        if number % accumulate == accumulate - 1:
            model.zero_grad()
    return found


def net(faults: Faults) -> Net:
    torch.manual_seed(3)
    return Net(faults)


@pytest.mark.parametrize("failing", [{}, {"forward": {5}}, {"backward": {5, 6}}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_gradient_counts_twice(accumulate: int, failing: dict[str, Any]) -> None:
    faults = Faults(**failing)
    journal, model = Recorded(), net(faults)
    session = rematic.attach(
        model,
        policy="keep",
        budget="1GiB",
        probe=SimulatedProbe(),
        recipe={
            "goals": {"loss_tolerance": 0.01, "ooms_max": 9},
            "policy": {"trust": ["*"], "op_retry": "never"},
        },
        journal=journal,
    )
    found = gradients(session, model, accumulate=accumulate)
    assert faults.num_fired == sum(map(len, failing.values()))
    plain = gradients(None, net(Faults()), accumulate=accumulate)
    assert len(found) == len(plain)
    assert all(map(torch.equal, found, plain))
    compared = [event["difference"] for event in journal.events if event["event"] == "compare"]
    assert compared == [0.0], "of the step after the switch, or of the first that did not fail"
    session.detach()


def test_a_comparison_without_room_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sample: GradientSample, other: GradientSample) -> None:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(GradientSample, "difference_from", fails)
    journal, model = Recorded(), net(Faults())
    session = rematic.attach(
        model,
        policy="keep",
        budget="1GiB",
        probe=SimulatedProbe(),
        recipe={"goals": {"loss_tolerance": 0.01, "ooms_max": 9}, "policy": {"trust": ["*"]}},
        journal=journal,
    )
    found = gradients(session, model, accumulate=1)
    assert all(map(torch.equal, found, gradients(None, net(Faults()), accumulate=1)))
    assert not [event for event in journal.events if event["event"] in ("compare", "stop")]
    assert any(event.get("comparison") for event in journal.events if event["event"] == "step")
    session.detach()
