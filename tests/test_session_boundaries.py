"""Policies change at boundaries only (H3), in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rematic
from rematic.memory import SimulatedProbe
from rematic.policy import KEEP, RECOMPUTE, Keep, Policy, Recompute, Rule, policy_to_plain
from rematic.recipes import PolicyConfig, Recipe
from tests.activations.blocks import Model, gradients, make_input, make_model
from tests.activations.parity import same_bits
from tests.events import Events


class Run:
    """A model under a session, with an optimizer or without."""

    def __init__(self, *, policy: Any = "keep", optimizer: bool = True) -> None:
        self.model: Model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.journal = Events()
        self.session = rematic.attach(
            self.model,
            self.optimizer if optimizer else None,
            policy=policy,
            journal=self.journal,
        )

    def micro_batch(self, inside: Callable[[], object] | None = None) -> int:
        """Runs one and returns how many units were replayed."""
        with self.session.step(make_input()):
            loss = self.model(make_input())
            if inside is not None:
                inside()
            loss.backward()
        assert self.session.last_step is not None
        return self.session.last_step.replays


def test_a_switch_between_steps_holds_at_once() -> None:
    run = Run()
    assert run.micro_batch() == 0
    run.optimizer.step()
    run.session.switch("recompute", reason="long documents ahead")
    assert run.session.policy == RECOMPUTE
    assert run.micro_batch() == 3
    (event,) = run.journal.of("switch")
    assert event == {
        "event": "switch",
        "from": "keep",
        "to": "recompute",
        "step": 1,
        "reason": "long documents ahead",
        "policy": policy_to_plain(RECOMPUTE),
    }


def test_a_switch_before_the_first_step_holds_at_once() -> None:
    run = Run()
    run.session.switch("recompute")
    assert run.session.policy == RECOMPUTE
    assert run.micro_batch() == 3


def test_a_switch_inside_a_step_waits_for_the_optimizer() -> None:
    """Asked for between forward and backward, in the first of three accumulated micro-batches."""
    run = Run()
    assert run.micro_batch(lambda: run.session.switch("recompute")) == 0
    assert run.session.policy == KEEP
    assert run.micro_batch() == 0
    assert run.micro_batch() == 0
    assert run.journal.of("switch") == []
    run.optimizer.step()
    assert run.session.policy == RECOMPUTE
    assert [event["step"] for event in run.journal.of("switch")] == [3]
    assert run.micro_batch() == 3


def test_a_switch_from_inside_a_forward_waits() -> None:
    run = Run()

    def ask(module: object, args: object, output: object) -> None:
        run.session.switch("recompute")

    hook = run.model.blocks[0].register_forward_hook(ask)
    assert run.micro_batch() == 0
    hook.remove()
    run.optimizer.step()
    assert run.micro_batch() == 3


def test_without_an_optimizer_every_step_ends_at_a_boundary() -> None:
    run = Run(optimizer=False)
    assert run.micro_batch(lambda: run.session.switch("recompute")) == 0
    assert run.session.policy == RECOMPUTE
    assert run.micro_batch() == 3


def test_a_switch_between_micro_batches_changes_no_bit_of_accumulated_gradients() -> None:
    plain = make_model()
    for _ in range(3):
        plain(make_input()).backward()
    run = Run()
    for _ in range(3):
        run.micro_batch(lambda: run.session.switch("recompute"))
    assert all(map(same_bits, gradients(run.model), gradients(plain)))


def test_an_aborted_step_is_no_boundary() -> None:
    run = Run()
    run.micro_batch()

    def fail() -> None:
        run.session.switch("recompute")
        raise KeyError

    with pytest.raises(KeyError):
        run.micro_batch(fail)
    assert run.session.policy == KEEP
    run.optimizer.step()
    assert run.session.policy == RECOMPUTE


def test_rules_of_ones_own() -> None:
    run = Run()
    own = Policy(
        name="own", rules=(Rule(pattern="blocks.[01]", action=Recompute()),), default=Keep()
    )
    run.session.switch(own)
    assert run.micro_batch() == 2
    run.optimizer.step()
    run.session.rollback(reason="no gain")
    assert run.session.policy == KEEP
    (event,) = run.journal.of("rollback")
    assert (event["from"], event["to"], event["reason"]) == ("own", "keep", "no gain")
    assert run.micro_batch() == 0


# What is asked for inside one step, and (policy, pinned, number of entries) after the boundary.
Asks = Callable[[rematic.Session], object]
SEQUENCES: dict[str, tuple[list[Asks], tuple[str, bool, int]]] = {
    "two switches": (
        [lambda s: s.switch("recompute"), lambda s: s.switch("planned")],
        ("planned", False, 3),
    ),
    "switch and back": (
        [lambda s: s.switch("recompute"), lambda s: s.rollback()],
        ("keep", False, 1),
    ),
    "pin and unpin": (
        [lambda s: s.pin("recompute"), lambda s: s.unpin()],
        ("recompute", False, 2),
    ),
    "unpin and pin": ([lambda s: s.unpin(), lambda s: s.pin("keep")], ("keep", True, 1)),
    "pin, unpin, switch": (
        [lambda s: s.pin("recompute"), lambda s: s.unpin(), lambda s: s.switch("planned")],
        ("planned", False, 3),
    ),
    "two switches, two back": (
        [
            lambda s: s.switch("recompute"),
            lambda s: s.switch("planned"),
            lambda s: s.rollback(steps=2),
        ],
        ("keep", False, 1),
    ),
}


@pytest.mark.parametrize(("asks", "after"), SEQUENCES.values(), ids=SEQUENCES.keys())
@pytest.mark.parametrize("delayed", [True, False], ids=["inside a step", "between steps"])
def test_requests_take_effect_in_order(
    asks: list[Asks], after: tuple[str, bool, int], delayed: bool
) -> None:
    run = Run()

    def ask() -> None:
        for request in asks:
            request(run.session)

    if delayed:
        run.micro_batch(ask)
        assert run.session.policy == KEEP
        assert not run.session.history.pinned
        run.optimizer.step()
    else:
        ask()
    history = run.session.history
    assert (history.current.name, history.pinned, len(history.entries)) == after


REFUSED: dict[str, tuple[list[Asks], str]] = {
    "unknown policy": ([lambda s: s.switch("none")], "^unknown policy 'none'"),
    "rule that matches nothing": (
        [lambda s: s.switch(Policy(name="p", rules=(Rule(pattern="x", action=Keep()),)))],
        "^pattern 'x' matches none of the 3 modules",
    ),
    "pin with a rule that matches nothing": (
        [lambda s: s.pin(Policy(name="p", rules=(Rule(pattern="x", action=Keep()),)))],
        "^pattern 'x' matches none of the 3 modules",
    ),
    "nothing to roll back": ([lambda s: s.rollback()], "^cannot roll back 1 switches: there were"),
    "one switch, two back": (
        [lambda s: s.switch("recompute"), lambda s: s.rollback(), lambda s: s.rollback()],
        "^cannot roll back 1 switches: there were none",
    ),
    "switch after a pin": (
        [lambda s: s.pin("keep"), lambda s: s.switch("recompute")],
        "^cannot switch to 'recompute': the policy 'keep' is pinned",
    ),
    "rollback after a pin": (
        [lambda s: s.pin("recompute"), lambda s: s.rollback()],
        "^cannot roll back 1 switches: the policy 'recompute' is pinned",
    ),
}


@pytest.mark.parametrize(("asks", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("delayed", [True, False], ids=["inside a step", "between steps"])
def test_what_cannot_be_done_is_refused_when_it_is_asked_for(
    asks: list[Asks], message: str, delayed: bool
) -> None:
    """Never later, inside the optimizer's step."""
    run = Run()

    def ask() -> None:
        *before, last = asks
        for request in before:
            request(run.session)
        with pytest.raises(ValueError, match=message):
            last(run.session)

    if delayed:
        run.micro_batch(ask)
        run.optimizer.step()
    else:
        ask()
    assert not any(pending for pending in run.session._policies.pending)


def test_several_optimizers_all_mark_boundaries() -> None:
    model = make_model()
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in model.blocks]
    session = rematic.attach(model, optimizers, policy="keep")
    with session.step(make_input()):
        model(make_input()).backward()
        session.switch("recompute")
    assert session.policy == KEEP
    optimizers[2].step()
    assert session.policy == RECOMPUTE
    session.detach()


def test_an_optimizer_added_later_marks_boundaries_too() -> None:
    model = make_model()
    session = rematic.attach(model, policy="keep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.add_optimizers(optimizer)
    with session.step(make_input()):
        model(make_input()).backward()
        session.switch("recompute")
    assert session.policy == KEEP
    optimizer.step()
    assert session.policy == RECOMPUTE
    session.detach()


@pytest.mark.parametrize("op_retry", ["auto", "always"])
def test_the_optimizer_is_covered_without_a_budget_where_always_is_asked_for(op_retry: Any) -> None:
    recipe = Recipe(policy=PolicyConfig(op_retry=op_retry))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with SimulatedProbe() as probe:
        session = rematic.attach(model, optimizer, recipe=recipe, policy="keep", probe=probe)
        model(make_input()).backward()
        alive = model(make_input(256))  # what can be let go while the optimizer makes its state
        probe.budget_bytes = probe.allocated_bytes()
        if op_retry == "always":
            optimizer.step()
        else:
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
    del alive
    session.detach()
