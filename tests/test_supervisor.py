"""A session under supervision: verdicts become changes, at boundaries, and the bits stay."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import pytest
import torch

import rematic
from rematic.control import audit
from rematic.memory import MemorySnapshot
from rematic.policy import KEEP, RECOMPUTE, SELECTIVE, Keep, Policy, Recompute, Rule
from rematic.recipes import ControlConfig, GoalsConfig, Recipe
from rematic.supervisor import RunStoppedError
from tests.activations.blocks import make_input, make_model
from tests.activations.parity import same_bits
from tests.events import Events

MIB = 1 << 20
QUIET = MemorySnapshot(
    allocated_bytes=100 * MIB,
    reserved_bytes=200 * MIB,
    peak_allocated_bytes=200 * MIB,
    capacity_bytes=1000 * MIB,
    inactive_split_bytes=0,
    num_alloc_retries=0,
    num_ooms=0,
)
CRAMPED = dataclasses.replace(QUIET, allocated_bytes=990 * MIB, reserved_bytes=995 * MIB)
IN_PIECES = dataclasses.replace(QUIET, reserved_bytes=950 * MIB, inactive_split_bytes=400 * MIB)
UNKNOWN = MemorySnapshot()


class PaperProbe:
    """Says what it is told to say."""

    kind = "cuda"

    def __init__(self) -> None:
        self.says = QUIET

    def allocated_bytes(self) -> int | None:
        return self.says.allocated_bytes

    def snapshot(self) -> MemorySnapshot:
        return self.says


class Run:
    """A model that trains under a probe of paper."""

    def __init__(self, *, policy: Any = "keep", recipe: Recipe | None = None, **options: Any):
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.probe, self.journal = PaperProbe(), Events()
        self.session = rematic.attach(
            self.model,
            self.optimizer,
            policy=policy,
            recipe=recipe or Recipe(),
            probe=self.probe,
            journal=self.journal,
            **options,
        )

    def steps(self, number: int, *, micro_batches: int = 1) -> None:
        for _ in range(number):
            for _ in range(micro_batches):
                with self.session.step(make_input()):
                    self.model(make_input()).backward()
            self.optimizer.step()

    def decisions(self) -> list[tuple[str, str, str]]:
        return [(e["settled"], e["change"], e["policy"]) for e in self.journal.of("decision")]


def test_quiet_steps_are_not_worth_a_line() -> None:
    run = Run()
    run.steps(5)
    assert run.decisions() == []
    (event,) = run.journal.of("control")
    assert event["rules"]["ladder"] == ["keep", "selective", "recompute", "recompute+offload"]
    assert event["rules"]["adapt"] is True
    assert event["rules"]["can_release"] is True
    assert event["escalation"] == "warn"


def test_pressure_that_lasts_takes_the_next_heavier_policy() -> None:
    """F11, first half, and H3: at the boundary, not between micro-batches."""
    run = Run()
    run.steps(2)
    run.probe.says = CRAMPED
    run.steps(1, micro_batches=4)
    assert [s["policy"] for s in run.journal.of("step")[2:]] == ["keep"] * 4
    assert run.session.policy == SELECTIVE
    (switch,) = run.journal.of("switch")
    assert (switch["from"], switch["to"]) == ("keep", "selective")
    assert switch["reason"].startswith("pressure in 3 steps in a row: the peak is above 97%")
    assert ("pressure", "switch", "selective") in run.decisions()


def test_a_step_after_trouble_is_armed() -> None:
    run = Run(recipe=Recipe(control=ControlConfig(adapt=False)))
    run.steps(2)
    assert run.session.last_step is not None
    assert not run.session.last_step.armed
    run.probe.says = CRAMPED
    run.steps(2)
    assert run.session.last_step.armed
    run.probe.says = QUIET
    run.steps(4)
    assert not run.session.last_step.armed


def test_fragmentation_releases_cached_blocks_and_advises(caplog: pytest.LogCaptureFixture) -> None:
    """F11, second half: no heavier policy."""
    run = Run()
    run.probe.says = IN_PIECES
    with caplog.at_level(logging.WARNING, "rematic"):
        run.steps(12)
    assert run.session.policy == KEEP
    assert [e["bytes_freed"] for e in run.journal.of("release")] == [0, 0]
    advice = [r for r in caplog.messages if "expandable_segments:True" in r]
    assert len(advice) == 1


def test_without_statistics_nothing_is_done_ahead_of_errors() -> None:
    """F14."""
    run = Run()
    run.probe.says = UNKNOWN
    run.steps(8)
    assert run.decisions() == [("unknown", "none", "")]
    assert not run.session.last_step.armed  # type: ignore[union-attr]
    assert run.session.policy == KEEP


def test_a_heavier_policy_keeps_the_rules() -> None:
    rules = (Rule(pattern="blocks.0", action=Keep()),)
    run = Run(policy=Policy(name="keep", rules=rules, default=Keep()))
    run.probe.says = CRAMPED
    run.steps(3)
    assert run.session.policy == dataclasses.replace(SELECTIVE, rules=rules)


@pytest.mark.parametrize("policy", ["planned", Policy(name="own", default=Recompute())])
def test_planned_and_policies_of_ones_own_are_never_left(policy: Any) -> None:
    run = Run(policy=policy, budget="1GiB")
    run.probe.says = CRAMPED
    run.steps(15)
    assert run.journal.of("switch") == []


def test_leave_can_be_refused() -> None:
    run = Run(recipe=Recipe(control=ControlConfig(adapt=False)))
    run.probe.says = CRAMPED
    run.steps(6)
    assert run.session.policy == KEEP


def slowed(run: Run) -> None:
    """Lets every forward of the second policy sleep, on a busy machine for longer."""

    def wait(module: object, args: object) -> None:
        if run.session.policy == RECOMPUTE:
            kept = [s["seconds"] for s in run.journal.of("step") if s["policy"] == "keep"]
            time.sleep(max(0.02, 5 * max(kept)))

    run.model.register_forward_pre_hook(wait)


def test_an_injected_slow_policy_is_rolled_back_within_its_probation() -> None:
    control = ControlConfig(probation_steps=4)
    run = Run(recipe=Recipe(control=control, goals=GoalsConfig(slowdown_max=3.0)))
    slowed(run)
    run.steps(6)
    run.session.switch("recompute", reason="injected")
    run.steps(5)
    assert run.session.policy == KEEP
    (event,) = run.journal.of("rollback")
    assert (event["from"], event["to"]) == ("recompute", "keep")
    assert event["reason"].startswith("recompute has not met its goals (slowdown) (slowdown ")
    (decision,) = [e for e in run.journal.of("decision") if e["change"] == "rollback"]
    gates = {gate["name"]: gate for gate in decision["gates"]}
    assert gates["slowdown"]["measured"] > 3 * gates["slowdown"]["baseline"]
    state = run.session.state_dict()["control"]
    assert state["quarantine"] == [["recompute", 1, "slowdown"]]


def test_a_rollback_leads_to_the_policy_that_was_compared_with() -> None:
    """Not to one that was switched to and from again before it had a step."""
    run = Run(recipe=Recipe(goals=GoalsConfig(throughput_min=1e12)))
    run.steps(2)
    run.session.switch("selective")
    run.session.switch("recompute")
    run.steps(9)
    (decision,) = [e for e in run.journal.of("decision") if e["change"] == "rollback"]
    (rollback,) = run.journal.of("rollback")
    assert decision["policy"] == rollback["to"] == run.session.policy.name == "keep"
    assert audit(run.journal.events).differences == ()


def test_what_is_refused_does_not_follow(caplog: pytest.LogCaptureFixture) -> None:
    """An operator's pin waits for the same boundary."""
    run = Run()
    run.probe.says = CRAMPED
    run.steps(2)
    with run.session.step(make_input()):
        run.model(make_input()).backward()
        run.session.pin("keep")
    run.optimizer.step()
    (refused,) = run.journal.of("refused")
    assert "the policy 'keep' is pinned" in refused["reason"]
    assert caplog.messages == [f"policy selective does not follow: {refused['reason']}"]
    assert run.session.policy == KEEP


def test_changes_keep_the_bits() -> None:
    """Against a plain run of as many steps: weights, after a switch up and one back."""
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    run = Run(recipe=Recipe(control=ControlConfig(cool_down_steps=2)))
    for i in range(16):
        run.probe.says = CRAMPED if 2 <= i < 6 else QUIET
        run.steps(1)
        plain(make_input()).backward()
        optimizer.step()
    assert [e["to"] for e in run.journal.of("switch")][:1] == ["selective"]
    assert all(map(same_bits, run.model.parameters(), plain.parameters()))


def test_the_state_goes_on_where_it_was() -> None:
    """F13: quarantine, cool-down and probation are in the checkpoint."""
    first = Run()
    first.probe.says = CRAMPED
    first.steps(4)
    state = first.session.state_dict()
    assert state["control"]["trial"]["policy"] == "selective"
    second = Run()
    second.session.load_state_dict(state)
    assert second.session.policy == SELECTIVE
    assert second.session.state_dict() == state
    second.steps(1)
    (event,) = second.journal.of("control")
    assert event["state"] == state["control"]


def trouble(run: Run) -> None:
    run.probe.says = CRAMPED
    run.steps(20)


STUCK = {"policy": "recompute+offload"}


def test_a_person_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(**STUCK)
    with caplog.at_level(logging.WARNING, "rematic"):
        trouble(run)
    (text,) = [r for r in caplog.messages if "nothing heavier is taken" in r]
    assert "Raise the budget, shorten the sequences, or pin a policy." in text


def test_a_persons_function_is_called() -> None:
    asked: list[str] = []
    recipe = Recipe(control=ControlConfig(escalation="call"))
    trouble(Run(recipe=recipe, on_escalation=asked.append, **STUCK))
    assert len(asked) == 1
    assert asked[0].startswith("pressure under policy 'recompute+offload' in 10 steps in a row")


def test_a_run_is_saved_and_stopped_between_steps() -> None:
    run = Run(recipe=Recipe(control=ControlConfig(escalation="checkpoint_and_stop")), **STUCK)
    weights: list[torch.Tensor] = []

    def save(report: Any) -> str:
        weights.extend(p.detach().clone() for p in run.model.parameters())
        return "last.ckpt"

    run.session.at_stop = save
    with pytest.raises(RunStoppedError, match=r"nothing heavier is taken.* saved to last\.ckpt"):
        trouble(run)
    (stop,) = run.journal.of("stop")
    assert (stop["reason"], stop["checkpoint"]) == ("a person must decide", "last.ckpt")
    assert all(map(same_bits, weights, run.model.parameters()))


def test_a_run_that_cannot_be_saved_is_stopped_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(recipe=Recipe(control=ControlConfig(escalation="checkpoint_and_stop")), **STUCK)

    def save(report: Any) -> str:
        raise OSError("disk full")

    run.session.at_stop = save
    with pytest.raises(RunStoppedError, match=r"could not be saved \(OSError: disk full\)"):
        trouble(run)
    (stop,) = run.journal.of("stop")
    assert (stop["checkpoint"], stop["not_saved"]) == (None, "OSError: disk full")
    assert any("disk full" in message for message in caplog.messages)


def test_an_interrupt_while_a_run_is_saved_is_one_and_the_stop_is_written() -> None:
    run = Run(recipe=Recipe(control=ControlConfig(escalation="checkpoint_and_stop")), **STUCK)

    def save(report: Any) -> str:
        raise KeyboardInterrupt

    run.session.at_stop = save
    with pytest.raises(KeyboardInterrupt):
        trouble(run)
    assert len(run.journal.of("stop")) == 1


@pytest.mark.parametrize(
    ("escalation", "function", "given"),
    [("call", None, "there is no function"), ("warn", print, "there is a function")],
)
def test_a_function_without_use_is_refused(escalation: Any, function: Any, given: str) -> None:
    recipe = Recipe(control=ControlConfig(escalation=escalation))
    with pytest.raises(ValueError, match=f"is '{escalation}' and {given} to call: expected"):
        Run(recipe=recipe, on_escalation=function)


class LossRun(Run):
    """Runs by `session.run`, with gradients that are accumulated over two micro-batches."""

    def __init__(self, *, spoil: float = 0.0, probation_steps: int = 3) -> None:
        super().__init__(
            recipe=Recipe(
                control=ControlConfig(probation_steps=probation_steps),
                goals=GoalsConfig(loss_tolerance=1e-6, slowdown_max=1e9),
            )
        )
        self.spoil, self.calls = spoil, 0
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        noisy = torch.nn.functional.dropout(self.model(x).reshape(1), 0.5)
        kept = self.session.plan.num_kept
        loss = noisy.sum() + (0.0 if kept else self.spoil)
        loss.backward()
        return loss.detach()

    def steps(self, number: int, *, micro_batches: int = 2) -> None:
        for _ in range(number):
            for _ in range(micro_batches):
                self.losses.append(float(self.session.run(self.forward, make_input())))
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_what_could_not_be_compared_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """`session.step` cannot run a batch twice."""
    goals = GoalsConfig(gradient_tolerance=0.1, slowdown_max=1e9)
    run = Run(recipe=Recipe(control=ControlConfig(probation_steps=3), goals=goals))
    run.steps(2)
    run.session.switch("recompute")
    run.steps(4)
    (decision,) = [e for e in run.journal.of("decision") if e["gates"]]
    assert {g["name"]: g["passed"] for g in decision["gates"]}["gradient"] is None
    (warning,) = [r.getMessage() for r in caplog.records if "was not judged" in r.getMessage()]
    assert warning.startswith("the gate 'gradient' was not judged: no batch of the probation ran")


def test_a_batch_twice_as_long_is_compared_too() -> None:
    run = LossRun(probation_steps=5)
    run.steps(2)
    run.session.switch("recompute")
    for batch in (4, 4, 8, 12, 20, 40):  # the first one begins the probation, the last is after it
        run.session.run(run.forward, make_input(batch))
        run.optimizer.step()
        run.optimizer.zero_grad()
    compared = [event["step"] for event in run.journal.of("compare")]
    assert compared == [5, 6, 8]


def test_a_lossy_policy_to_begin_with_is_only_taken_while_nobody_has_pinned_another() -> None:
    goals = GoalsConfig(gradient_tolerance=0.1)
    run = Run(policy="compress", recipe=Recipe(goals=goals))
    assert run.session.policy == RECOMPUTE
    run.session.pin("keep")
    run.steps(2)
    assert run.session.policy == KEEP
    (refused,) = run.journal.of("refused")
    assert "the policy 'keep' is pinned" in refused["reason"]
    run = Run(policy="compress", recipe=Recipe(goals=goals))
    run.steps(1)
    assert run.session.policy.name == "compress"
    assert Run(policy="compress").session.policy.name == "compress"


def test_one_batch_is_run_under_both_policies_and_counts_once() -> None:
    """Losses, weights and the generator are those of a run without the comparison."""
    runs = []
    for compared in (True, False):
        torch.manual_seed(0)
        run = LossRun()
        torch.manual_seed(7)
        run.steps(2)
        if compared:
            run.session.switch("recompute")
        run.steps(4)
        runs.append((run, torch.get_rng_state()))
    (first, generator), (second, plain_generator) = runs
    assert first.calls == second.calls + 1
    assert first.losses == second.losses
    assert torch.equal(generator, plain_generator)
    assert all(map(same_bits, first.model.parameters(), second.model.parameters()))
    (event,) = first.journal.of("compare")
    assert event["difference"] == 0.0
    assert [s.get("loss_difference") for s in first.journal.of("step")].count(0.0) == 1
    (decision,) = [e for e in first.journal.of("decision") if e["gates"]]
    assert {g["name"]: g["passed"] for g in decision["gates"]}["loss"] is True
    assert audit(first.journal.events).differences == ()


def test_a_policy_that_changes_the_loss_is_rolled_back() -> None:
    run = LossRun(spoil=0.5)
    run.steps(2)
    run.session.switch("recompute")
    run.steps(4)
    assert run.session.policy == KEEP
    (event,) = run.journal.of("rollback")
    assert "has not met its goals (loss)" in event["reason"]


def test_a_step_that_cannot_be_put_back_is_not_compared() -> None:
    """An optimizer that steps inside: the first run is the step."""
    run = LossRun()
    run.steps(2)
    run.session.switch("recompute")
    before = run.calls

    def with_optimizer(x: torch.Tensor) -> torch.Tensor:
        loss = run.forward(x)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.sub_(0.1)
        return loss

    for _ in range(4):
        run.session.run(with_optimizer, make_input())
    assert run.calls == before + 4
    assert run.journal.of("compare") == []


def test_a_heap_is_not_released() -> None:
    run = Run()
    run.probe.kind = "host"  # type: ignore[misc]
    run.probe.says = IN_PIECES
    run.steps(12)
    assert run.journal.of("release") == []
    assert run.decisions() == [("fragmentation", "none", "")]
