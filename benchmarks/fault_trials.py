"""Parts of a training in which memory runs out at chosen ops, judged bit by bit.

What `fault_sweep.py` repeats for every position; the tests run a slice of it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

import rematic
from benchmarks.failing_ops import FailingOps, OpSurvey, SurveyedOp
from benchmarks.fault_marks import Mark, Training
from benchmarks.fault_models import MODELS, TOKEN_WISE
from rematic.activations import Unit
from rematic.memory import SimulatedProbe
from rematic.policy import ACTIONS, Compress, Policy, Rule, Tile
from rematic.recipes import ControlConfig, PolicyConfig, Recipe
from rematic.stash import CompressStash, DiskStash

LEVELS = ("op", "unit", "op+unit", "step", "all")
"""Which answers are in force: one of them alone, those below the step, or all of them."""
KINDS = ("before an op", "after an allocation")
"""Before the op runs; or after it ran, its output dropped, as kernels that allocate late do."""
NUM_STEPS = 2
"""Optimizer steps: the first one makes its state, the second one finds it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What runs, and how failures may be answered."""

    model: str
    action: str
    level: str
    accumulate: int = 1
    autocast: bool = False
    kind: str = KINDS[0]

    @property
    def is_lossy(self) -> bool:
        """Whether bits may differ."""
        return self.action == Compress.name


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A micro-batch or an optimizer step of a training."""

    batch: Any
    """What forward is given; None for an optimizer step."""

    clears: bool
    """Whether gradients are cleared before it."""

    before: Mark
    """What the plain training is when it begins."""

    after: Mark
    """What it is when it ends."""


class Trials:
    """Goes through stages of one training, as often as asked, from the same beginnings.

    To be entered.

    Args:
        setting: What runs.
        probe: The memory, by default one without a limit.

    Attributes:
        stages: All stages, with the marks of plain steps: nothing attached, no mode around them.
            For `tile`, of steps in which nothing fails.
    """

    def __init__(self, setting: Setting, probe: SimulatedProbe | None = None) -> None:
        self.setting = setting
        self._probe = SimulatedProbe() if probe is None else probe
        self._training = Training(MODELS[setting.model], autocast=setting.autocast)
        self._session: rematic.Session | None = None
        self._patches = contextlib.ExitStack()
        if setting.action == Tile.name:  # compared with itself: it sums in another order
            self._session = attach(self._training, setting, self._probe)
        self.stages = [*self._plain_stages()]
        self._detach()
        gc.collect()
        gc.freeze()  # the answer to a failure collects garbage, and modules are not garbage

    def __enter__(self) -> Trials:
        """Leaves out answers, and lets everything move that may."""
        self._patches.enter_context(_answers(self.setting.level))
        self._patches.enter_context(_everything_moves())
        return self

    def __exit__(self, *error: object) -> None:
        """Detaches."""
        self._detach()
        self._patches.close()
        gc.unfreeze()

    def survey(self, number: int) -> list[SurveyedOp]:
        """Makes ready for `judge` of a stage, and returns its ops.

        The first stage is the first one of its session in every trial; a later stage is met again
        and again by the same session, which has come through those before it.

        Raises:
            RuntimeError: If the stage differs from the plain one although nothing fails.
        """
        self._begin()
        for earlier in self.stages[:number]:
            self._training.restore(earlier.before)
            self._run(earlier)
        surveys = [self._survey(self.stages[number])]
        if number > 0:
            surveys.append(self._survey(self.stages[number]))
        return min(surveys, key=len)  # some calls are looked at again, which takes more ops

    def _survey(self, stage: Stage) -> list[SurveyedOp]:
        self._training.restore(stage.before)
        with OpSurvey() as survey:
            self._run(stage)
        self._refuse(stage)
        return survey.ops

    def survey_all(self) -> list[SurveyedOp]:
        """Returns the ops of all stages, one after the other.

        Raises:
            RuntimeError: If a stage differs from the plain one although nothing fails.
        """
        self._begin()
        self._training.restore(self.stages[0].before)
        survey = OpSurvey()
        for stage in self.stages:
            if stage.clears:
                self._training.optimizer.zero_grad()
            with survey:
                self._run(stage)
            self._refuse(stage)
        return survey.ops

    def positions(self, ops: Sequence[SurveyedOp]) -> list[int]:
        """Returns the numbers, from 1, of the ops at which memory can run out."""
        late = self._is_late  # only what allocates can fail when it has run
        return [n for n, op in enumerate(ops, start=1) if op.allocates or not late]

    def judge(self, number: int, position: int) -> str:
        """Runs one stage in which memory runs out once.

        Args:
            number: Of the stage.
            position: Number of the op, from 1.

        Returns:
            `recovered`, `stopped_cleanly`, or what is wrong.
        """
        if number == 0:
            self._begin()
        return self._judge([self.stages[number]], FailingOps([position], late=self._is_late))

    def judge_all(self, positions: Sequence[int]) -> str:
        """Runs every stage; memory runs out at several ops, counted over all of them."""
        self._begin()
        return self._judge(self.stages, FailingOps(positions, late=self._is_late))

    def judge_budget(self) -> str:
        """Runs every stage within the budget of the probe."""
        self._begin()
        self._probe.track([*self._training.model.parameters(), *self._training.model.buffers()])
        return self._judge(self.stages, self._probe)

    @property
    def _is_late(self) -> bool:
        return self.setting.kind != KINDS[0]

    def _judge(self, stages: Sequence[Stage], failing: FailingOps | SimulatedProbe) -> str:
        training, lossy = self._training, self.setting.is_lossy
        for i, stage in enumerate(stages):
            if i == 0:
                training.restore(stage.before)
            elif stage.clears:
                training.optimizer.zero_grad()
            before = training.mark() if lossy else stage.before
            try:
                with failing:
                    self._run(stage)
            except rematic.TornOptimizerStepError as error:
                return _judge_torn(training.mark(), before, error.parameters)
            except torch.OutOfMemoryError as error:
                return _judge_stop(training.mark(), before, error)
            wrong = training.mark().differs_from(stage.after, lossy=lossy)
            if wrong:
                return f"wrong: {wrong[:3]}"
        return "recovered" if failing.num_ooms else "wrong: memory never ran out"

    def _plain_stages(self) -> Iterator[Stage]:
        accumulate = self.setting.accumulate
        batches = MODELS[self.setting.model].batches(NUM_STEPS * accumulate)
        for i, batch in enumerate(batches):
            yield self._plain_stage(batch, clears=i % accumulate == 0)
            if (i + 1) % accumulate == 0:
                yield self._plain_stage(None, clears=False)

    def _plain_stage(self, batch: Any, *, clears: bool) -> Stage:  # noqa: ANN401 - the model's
        if clears:
            self._training.optimizer.zero_grad()
        before = self._training.mark()
        stage = Stage(batch=batch, clears=clears, before=before, after=before)
        self._run(stage)
        return replace(stage, after=self._training.mark())

    def _run(self, stage: Stage) -> None:
        training, session = self._training, self._session
        step = training.forward_and_backward
        if stage.batch is None:
            training.optimizer.step()
        else:
            batch = stage.batch
            training.loss = step(batch) if session is None else session.run(step, batch)

    def _begin(self) -> None:
        self._detach()
        self._training.restore(self.stages[0].before)
        self._session = attach(self._training, self.setting, self._probe)

    def _refuse(self, stage: Stage) -> None:
        wrong = self._training.mark().differs_from(stage.after, lossy=self.setting.is_lossy)
        if wrong:
            raise RuntimeError(f"{self.setting}: a stage in which nothing fails: {wrong[:3]}")

    def _detach(self) -> None:
        if self._session is not None:
            self._session.detach()
            self._session = None


def attach(training: Training, setting: Setting, probe: SimulatedProbe) -> rematic.Session:
    """Attaches a session with the answers of a level in force, and no budget in the way."""
    op_retry: Any = {"op": "always", "op+unit": "always", "all": "auto"}.get(setting.level, "never")
    attempts = 4 if setting.level in ("step", "all") else 1
    recipe = Recipe(
        policy=PolicyConfig(op_retry=op_retry, units=_units(setting)),
        control=ControlConfig(attempts=attempts),
    )
    return rematic.attach(
        training.model,
        training.optimizer,
        recipe=recipe,
        policy=_policy(setting),
        budget="64GiB",
        probe=probe,
    )


def _units(setting: Setting) -> tuple[str, ...]:
    return TOKEN_WISE[setting.model] if setting.action == Tile.name else ()


def _policy(setting: Setting) -> Policy:
    if setting.action == Tile.name:
        rule = Rule(pattern="*", action=Tile(num_tiles=3))
        return Policy(name=setting.action, rules=(rule,))
    return Policy(name=setting.action, default=ACTIONS[setting.action]())


def _judge_torn(torn: Mark, before: Mark, named: Sequence[str]) -> str:
    kinds = ("weight ", "optimizer ")
    changed = {
        name.split(" ")[1]
        for name, value in torn.values.items()
        if name.startswith(kinds) and _has_changed(value, before.values.get(name))
    }
    unnamed = sorted(changed - set(named))
    return f"wrong: torn but not named {unnamed}" if unnamed else "stopped_cleanly"


def _has_changed(value: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    if value is None or before is None:
        return value is not before
    return not torch.equal(value, before)


def _judge_stop(now: Mark, before: Mark, error: torch.OutOfMemoryError) -> str:
    """The model must be as before what failed: a micro-batch, or an optimizer step."""
    differing = now.differs_from(before)
    num_gradients = sum(name.startswith("gradient ") for name in differing)
    wrong = [name for name in differing if not name.startswith("gradient ")]
    report = getattr(error, "report", None)
    if num_gradients and num_gradients != getattr(report, "num_torn_gradients", 0):
        wrong.append(f"{num_gradients} gradients")
    return f"wrong: stopped with {wrong[:3]}" if wrong else "stopped_cleanly"


@contextlib.contextmanager
def _answers(level: str) -> Iterator[None]:
    """Leaves out the retry of units where another level is looked at alone."""
    if "unit" in level or level == "all":
        yield
    else:
        with mock.patch.object(Unit, "_can_run_again", return_value=False):
            yield


@contextlib.contextmanager
def _everything_moves() -> Iterator[None]:
    """Moves tensors whatever their size: the models here are small."""
    place = "rematic.activations.stash_places."
    disk = functools.partial(DiskStash, min_bytes=1)
    compress = functools.partial(CompressStash, min_bytes=1)
    with mock.patch(place + "DiskStash", disk), mock.patch(place + "CompressStash", compress):
        yield
