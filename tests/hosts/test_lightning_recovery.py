"""A fit in which memory runs out is the fit in which it does not, bit for bit."""

from __future__ import annotations

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import rematic
from rematic.memory import SimulatedProbe
from rematic.recipes import ControlConfig, GoalsConfig, PolicyConfig, Recipe
from tests.hosts.lightning_fits import Net, Recorded, Runner, ValidatedNet, session_of

STEP_ALONE = Recipe(policy=PolicyConfig(op_retry="never", trust=("*",)))
ENTRIES = ("strategy", "callback")


class Faults:
    """The moments at which memory runs out; each is passed 14 times in a fit, and in retries."""

    def __init__(self) -> None:
        self.at: dict[str, set[int]] = {}
        self.passed: dict[str, int] = {}
        self.num_fired = 0

    def point(self, where: str) -> None:
        self.passed[where] = self.passed.get(where, 0) + 1
        if self.passed[where] in self.at.get(where, ()):
            self.num_fired += 1
            raise torch.OutOfMemoryError("injected")


FAULTS = Faults()


class Point(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        FAULTS.point("backward")
        return gradient


class FaultyNet(Net):
    """Runs out of memory where it is told to; changes its state in every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps, self.num_hooks = 0, 0
        self.last: Tensor | None = None
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 2:
                FAULTS.point("forward")
            x = block(x)
            if i == 1:
                x = Point.apply(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.num_steps += 1
        self.seen.append(batch_idx)
        output = super().training_step(batch, batch_idx)
        self.last = output["loss"]
        FAULTS.point("loss")
        return output

    def on_before_backward(self, loss: Tensor) -> None:
        self.num_hooks += 1
        self.log("hooks", float(self.num_hooks), on_step=True, on_epoch=True)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_hooks += 10

    def on_train_epoch_end(self) -> None:
        self.log("all", self.all.compute().sum())


PLACES = {
    "forward, first step": {"forward": {1}},
    "forward": {"forward": {3, 4, 11}},
    "loss": {"loss": {2, 9, 10, 11}},
    "backward, first step": {"backward": {1}},
    "backward": {"backward": {4, 5, 12}},
    "everywhere": {"forward": {3, 17}, "loss": {6, 15}, "backward": {4, 5, 13}},
}


@pytest.fixture(scope="module")
def references() -> dict[Any, Any]:
    return {}


def _state(module: FaultyNet) -> tuple[Any, ...]:
    metrics = (module.mean._update_count, module.all._update_count, len(module.all.value))
    return (module.num_steps, module.num_hooks, module.seen, metrics)


def check(runner: Runner, references: Any, at: Any, entry: dict[str, Any], **options: Any) -> Any:
    key = tuple(sorted(options.items()))
    if key not in references:
        FAULTS.__init__()
        references[key] = runner.fit(FaultyNet, **options)
    FAULTS.__init__()
    FAULTS.at = at
    fitted = runner.fit(FaultyNet, **options, **entry)
    assert FAULTS.num_fired == sum(map(len, at.values()))
    fitted.is_same_as(references[key])
    assert _state(fitted.module) == _state(references[key].module)
    return fitted


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_failures_everywhere_in_every_kind_of_fit(
    runner: Runner, references: Any, accumulate: int, precision: str
) -> None:
    """Case F9: retried inside the seams, where the fit goes on."""
    options = {
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 0.5,
        "precision": precision,
    }
    entry = runner.entry("strategy", policy="keep", recipe=STEP_ALONE)
    check(runner, references, PLACES["everywhere"], entry, **options)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("place", PLACES)
def test_every_place_with_both_entries(
    runner: Runner, references: Any, place: str, entry: str
) -> None:
    options = {"accumulate_grad_batches": 3, "precision": "fp32"}
    made = runner.entry(entry, policy="keep", recipe=STEP_ALONE)
    fitted = check(runner, references, PLACES[place], made, **options)
    assert fitted.session.num_steps == 14


def test_no_hook_is_left_on_a_parameter(runner: Runner, references: Any) -> None:
    fitted = check(
        runner,
        references,
        PLACES["backward"],
        runner.entry("strategy", recipe=STEP_ALONE, policy="keep"),
    )
    assert all(not p._post_accumulate_grad_hooks for p in fitted.module.parameters())
    assert "backward" not in vars(fitted.trainer.precision_plugin)


class Watching(FaultyNet):
    """Whether the block's output of a failed backward is alive in the forward after it."""

    refs: tuple[Any, ...] = ()
    alive: tuple[bool, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        Watching.alive += tuple(ref() is not None for ref in Watching.refs)
        for block in self.blocks[:2]:
            x = block(x)
        Watching.refs = (weakref.ref(x),)
        for block in self.blocks[2:]:
            x = block(Point.apply(x))
        return self.head(x)


def test_a_failed_backward_is_freed_although_the_trainer_holds_its_loss(runner: Runner) -> None:
    """Case F2."""
    FAULTS.__init__()
    FAULTS.at = {"backward": {5}}
    Watching.refs, Watching.alive = (), ()
    entry = runner.entry("strategy", recipe=STEP_ALONE, policy="keep")
    runner.fit(Watching, max_epochs=1, limit_train_batches=3, **entry)
    assert FAULTS.num_fired == 1
    assert len(Watching.alive) == 3
    assert not any(Watching.alive)


class NeverFits(FaultyNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2:
            raise torch.OutOfMemoryError("injected")
        return output


class FailingUpdate(pl.Callback):
    """Runs out of memory once in an update, where the optimizer makes its state if it is the first.

    Entered in the closure, so that the retry at the op is entered after it and sees the error.
    """

    def __init__(self, number: int) -> None:
        self.probe = SimulatedProbe(fail_at_ops=[5])
        self._number = number

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._number:
            self.probe.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._number + 1 and self.probe.num_ooms:
            self._number = -1
            self.probe.__exit__(None, None, None)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_update_that_runs_out_of_memory(runner: Runner, entry: str, number: int) -> None:
    FAULTS.__init__()
    plain = runner.fit(FaultyNet)
    FAULTS.__init__()
    failing = FailingUpdate(number)
    always = Recipe(policy=PolicyConfig(op_retry="always", trust=("*",)))
    made = runner.entry(entry, policy="keep", recipe=always)
    made["callbacks"] = [*made.get("callbacks", []), failing]
    fitted = runner.fit(FaultyNet, **made)
    assert failing.probe.num_ooms == 1
    fitted.is_same_as(plain)


COMPARED = Recipe(
    policy=PolicyConfig(op_retry="never", trust=("*",)),
    goals=GoalsConfig(loss_tolerance=0.0, gradient_tolerance=0.0, ooms_max=9, slowdown_max=1e9),
    control=ControlConfig(probation_steps=3),
)


class Switching(Callback):
    """Takes another policy after the third batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        session = session_of(trainer)
        if session is not None and session.num_steps == 3:
            session.switch("recompute")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("at", [{}, {"backward": {5}}, {"backward": {6}}, {"forward": {5, 6}}])
def test_a_batch_that_runs_under_two_policies_counts_once(
    runner: Runner, references: Any, at: Any, accumulate: int, precision: str, entry: str
) -> None:
    """The second batch of a probation, or a later one where memory runs out in its two runs."""
    journal = Recorded()
    made = runner.entry(entry, policy="keep", recipe=COMPARED, journal=journal)
    made["callbacks"] = [*made.get("callbacks", ()), Switching()]
    options = {"accumulate_grad_batches": accumulate, "precision": precision}
    fitted = check(runner, references, at, made, **options)
    assert fitted.session.policy.name == "recompute"
    (compared,) = [event for event in journal.events if event["event"] == "compare"]
    assert compared["step"] == (4 if at == {} else 5)
    assert (compared["difference"], compared["gradient_difference"]) == (0.0, 0.0)
    assert compared["gradient_norm"] > 0
    (decision,) = [e for e in journal.events if e["event"] == "decision" and e["gates"]]
    gates = {gate["name"]: gate["passed"] for gate in decision["gates"]}
    assert (gates["loss"], gates["gradient"]) == (True, True)
    assert all(not p._backward_hooks for p in fitted.module.parameters())


class FailsInEvaluation(ValidatedNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            raise torch.OutOfMemoryError("injected")


@pytest.mark.parametrize("entry", ENTRIES)
def test_evaluation_leaves_the_policy_alone(
    runner: Runner, entry: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case F6."""
    journal = Recorded()
    made = runner.entry(entry, policy="keep", recipe=STEP_ALONE, journal=journal)
    trainer = runner.trainer(**made)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        runner.fit(FailsInEvaluation, trainer=trainer, validation=True)
    (message,) = [m for m in caplog.messages if m.startswith("memory ran out in")]
    assert message.startswith("memory ran out in validate, where no gradients are kept")
    assert not {"switch", "stop", "retry"} & {event["event"] for event in journal.events}


class Manual(FaultyNet):
    """Two backwards and two optimizers (case L1)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(16, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        first, second = self.optimizers()
        losses = [((self(x) - y) ** 2).mean(), ((self.other(x) - y) ** 2).mean()]
        for optimizer, loss in zip((first, second), losses, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss / 3)
            self.untoggle_optimizer(optimizer)
        FAULTS.point("loss")
        if batch_idx % 3 == 2:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
                FAULTS.point("stepped")
        self.losses.append(losses[0].item())

    def on_train_epoch_end(self) -> None: ...

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if not n.startswith("other")]
        return torch.optim.AdamW(rest, 1e-2), torch.optim.SGD(self.other.parameters(), 1e-2)


def manual(runner: Runner, at: Any, **options: Any) -> Any:
    FAULTS.__init__()
    FAULTS.at = at
    return runner.fit(Manual, **options)


@pytest.mark.parametrize("entry", ENTRIES)
def test_manual_optimization_is_recovered_while_no_optimizer_has_stepped(
    runner: Runner, entry: str
) -> None:
    wanted = manual(runner, {})
    made = runner.entry(entry, policy="keep", recipe=STEP_ALONE)
    at = {"forward": {2, 3, 20}, "backward": {4, 14}, "loss": {7, 8}}
    found = manual(runner, at, **made)
    assert FAULTS.num_fired == 7
    again = found.hooks - wanted.hooks
    assert set(again) <= {"on_before_backward", "on_after_backward"}, "as documented"
    found.hooks -= again
    found.is_same_as(wanted)


def test_manual_optimization_stops_once_an_optimizer_has_stepped(runner: Runner) -> None:
    made = runner.entry("strategy", policy="keep", recipe=STEP_ALONE)
    with pytest.raises(rematic.StepOutOfMemoryError, match="an optimizer has stepped inside"):
        manual(runner, {"stepped": {1}}, **made)


class OwnPrecision(MixedPrecision):
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:
        return super().pre_backward(tensor * 2, module)


def test_a_plugin_that_changes_the_loss_is_not_repeated(runner: Runner) -> None:
    FAULTS.__init__()
    FAULTS.at = {"backward": {3}}
    entry = runner.entry("strategy", policy="keep", recipe=STEP_ALONE)
    plugin = OwnPrecision("bf16-mixed", "cpu")
    with pytest.raises(rematic.StepOutOfMemoryError, match="OwnPrecision changes the loss before"):
        runner.fit(FaultyNet, plugins=[plugin], **entry)


def test_the_number_of_attempts_is_the_recipes(runner: Runner) -> None:
    FAULTS.__init__()
    recipe = Recipe(policy=STEP_ALONE.policy, control=ControlConfig(attempts=2))
    with pytest.raises(rematic.StepOutOfMemoryError) as caught:
        runner.fit(NeverFits, **runner.entry("strategy", policy="keep", recipe=recipe))
    assert len(caught.value.report.attempts) == 2


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_budget_too_small_for_the_plan(runner: Runner, references: Any, entry: str) -> None:
    """Nothing injected: ops, units and steps share the work."""
    with SimulatedProbe() as probe:
        free = runner.fit(
            FaultyNet, **runner.entry(entry, policy="keep", budget="1GiB", probe=probe)
        )
    assert free.session is not None
    peak_bytes = free.session.last_step.peak_bytes
    FAULTS.__init__()
    with SimulatedProbe(budget_bytes=int(1.2 * peak_bytes)) as probe:
        made = runner.entry(entry, policy="keep", budget="1GiB", probe=probe)
        tight = runner.fit(FaultyNet, **made)
    tight.is_same_as(free)
