"""One run of a few training steps in which memory runs out at chosen ops, judged bit by bit.

What `fault_sweep.py` repeats for every position; the tests run a slice of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import rematic
from rematic.activations import Unit
from rematic.memory import SimulatedProbe
from rematic.policy import ACTIONS, Compress, Policy
from rematic.recipes import ControlConfig, PolicyConfig, Recipe
from rematic.stash import CompressStash, DiskStash
from tests.activations import families
from tests.step_models import make_batches, make_tied_model

Step = Callable[[nn.Module, Any], torch.Tensor]
LEARNING_RATE = 1e-2
LEVELS = ("op", "unit", "step", "all")
"""Which answers are in force: one of them alone, or all of them."""
KINDS = ("before an op", "after an allocation")
"""Before the op runs; or after it ran, its output dropped, as kernels that allocate late do."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batches and its loss."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Any]]
    loss: Step


def _of_family(family: families.Family) -> Workload:
    def batches(number: int) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return [family.batch(generator) for _ in range(number)]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return family.build()

    return Workload(build=build, batches=batches, loss=family.loss)


MODELS = {
    "tied": Workload(
        build=make_tied_model, batches=make_batches, loss=lambda model, batch: model(batch)
    ),
    "mlp": _of_family(families.MLP),
    "batch-norm": _of_family(families.NORMS),
    "transformer-encoder": _of_family(families.ENCODER),
    "llama": _of_family(families.LLAMA_EAGER),
    "gpt2": _of_family(families.GPT2),
}
"""Dropout and running statistics with a tied weight, and five families."""


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
    def num_steps(self) -> int:
        """Optimizer steps: the first one makes its state, the second one finds it."""
        return 2 if self.accumulate == 1 else 1

    @property
    def is_lossy(self) -> bool:
        """Whether bits may differ."""
        return self.action == Compress.name


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Everything that must have the same bits, at one moment of a run."""

    name: str
    values: dict[str, torch.Tensor | None]

    def differs_from(self, wanted: Mark, *, lossy: bool = False) -> list[str]:
        """Names what differs, by a bit or by more than compressing explains."""
        if not lossy:
            return [n for n, value in wanted.values.items() if _differ(self.values[n], value)]
        exact = [n for n, value in wanted.values.items() if not _is_float(value)]
        wrong = [n for n in exact if _differ(self.values[n], wanted.values[n])]
        for kind, room in (("gradient", 0.5), ("weight", 0.2), ("buffer", 0.2), ("loss", 0.2)):
            if _distance(self.values, wanted.values, kind) > room:
                wrong.append(f"every {kind}")
        return wrong


class Run:
    """A few steps under a session, mark by mark.

    Args:
        setting: What runs.
        positions: Numbers of the ops (or allocations), from 1, at which memory runs out.
    """

    def __init__(self, setting: Setting, positions: tuple[int, ...] = ()) -> None:
        self._setting = setting
        at = "fail_at_ops" if setting.kind == KINDS[0] else "fail_at_allocations"
        self.probe = SimulatedProbe(**{at: positions})
        self._workload = MODELS[setting.model]
        self.model = self._workload.build()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, foreach=True)
        self._losses: list[torch.Tensor] = []

    def marks(self) -> Iterator[Mark]:
        """Runs, and yields a mark after every micro-batch and every optimizer step."""
        setting = self._setting
        number = setting.num_steps * setting.accumulate
        torch.manual_seed(9)
        with _answers(setting.level), _everything_moves():
            session = _attach(self.model, self._optimizer, setting, self.probe)
            try:
                yield self.mark("start")
                for i, batch in enumerate(self._workload.batches(number)):
                    with self.probe:
                        self._losses.append(session.run(self._step, batch))
                    yield self.mark(f"micro-batch {i}")
                    if (i + 1) % setting.accumulate == 0:
                        with self.probe:
                            self._optimizer.step()
                        yield self.mark(f"optimizer step after {i}")
                        self._optimizer.zero_grad()
            finally:
                session.detach()

    def _step(self, batch: Any) -> torch.Tensor:  # noqa: ANN401 - as the model's
        with torch.autocast("cpu", torch.bfloat16, enabled=self._setting.autocast):
            loss = self._workload.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def mark(self, name: str) -> Mark:
        """Copies everything."""
        values: dict[str, torch.Tensor | None] = {}
        for i, loss in enumerate(self._losses):
            values[f"loss {i}"] = loss.clone()
        for key, parameter in self.model.named_parameters():
            values[f"weight {key}"] = parameter.detach().clone()
            gradient = parameter.grad
            values[f"gradient {key}"] = None if gradient is None else gradient.clone()
        values |= {f"buffer {key}": b.clone() for key, b in self.model.named_buffers()}
        for key, module in self.model.named_modules():
            calls = getattr(module, "num_calls", None)
            if calls is not None:
                values[f"counter {key}"] = torch.tensor([calls, len(module.lengths)])
        for i, state in enumerate(self._optimizer.state.values()):
            values |= {f"optimizer {i} {key}": v.clone() for key, v in state.items()}
        values["generator"] = torch.get_rng_state()
        return Mark(name=name, values=values)


@functools.cache
def reference(setting: Setting) -> tuple[tuple[Mark, ...], int]:
    """Returns the marks of a run without failures, and the number of its positions."""
    run = Run(setting)
    marks = tuple(run.marks())
    number = run.probe.num_ops if setting.kind == KINDS[0] else run.probe.num_allocations
    return marks, number


@functools.cache
def plain_marks(model: str, accumulate: int, autocast: bool) -> tuple[Mark, ...]:
    """Returns the marks of the plain steps: nothing attached, no mode around them."""
    run = Run(
        Setting(model=model, action="keep", level="all", accumulate=accumulate, autocast=autocast)
    )
    with mock.patch.object(rematic, "attach", return_value=_Plain()):
        return tuple(run.marks())


class _Plain:
    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:  # noqa: ANN401 - passes through
        return step(batch)

    def detach(self) -> None:
        """Has nothing to undo."""


def positions_inside_units(setting: Setting) -> list[range]:
    """Returns the ops of each forward of a unit of `tied`, in a run without failures.

    From its first module on: before that the unit takes down its state.
    """
    run, found = Run(setting), []

    def begin(*_: object) -> None:
        if rematic.replaying():
            return
        found.append(range(run.probe.num_ops + 1, 0))

    def end(*_: object) -> None:
        found[-1] = range(found[-1].start, run.probe.num_ops + 1)

    for module in run.model.blocks:
        module.norm.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    list(run.marks())
    return found


def judge(setting: Setting, positions: tuple[int, ...]) -> str:
    """Runs; returns `recovered`, `stopped_cleanly`, `not_reached` or what is wrong."""
    wanted, _ = reference(setting)
    run, passed, after_failure = Run(setting, positions), [], 0
    try:
        for i, mark in enumerate(run.marks()):
            wrong = mark.differs_from(wanted[i], lossy=setting.is_lossy)
            if wrong:
                return f"wrong after {mark.name}: {wrong[:3]}"
            passed.append(mark)
            after_failure += run.probe.num_ooms == len(positions)
            if after_failure == 3:  # what failed, and what comes after it, are as they should be
                break
    except rematic.TornOptimizerStepError as error:
        return _judge_torn(run, passed[-1], error.parameters)
    except torch.OutOfMemoryError as error:
        return _judge_stop(run, passed, wanted, error)
    return "recovered" if run.probe.num_ooms else "not_reached"


def _judge_torn(run: Run, before: Mark, named: tuple[str, ...]) -> str:
    changed = [n for n in run.mark("torn").differs_from(before) if n.startswith("weight ")]
    unnamed = [n for n in changed if n.removeprefix("weight ") not in named]
    return f"wrong: torn but not named {unnamed}" if unnamed else "stopped_cleanly"


def _judge_stop(
    run: Run, passed: list[Mark], wanted: tuple[Mark, ...], error: torch.OutOfMemoryError
) -> str:
    """The model must be as before what failed: a micro-batch, or an optimizer step.

    (Gradients of a micro-batch after an optimizer step were set to None after the mark.)
    """
    before, now = passed[-1], run.mark("stopped")
    cleared = before.name.startswith(("optimizer", "start"))
    wrong = []
    num_gradients = 0
    for name in now.differs_from(before):
        if not name.startswith("gradient "):
            wrong.append(name)
        elif not (cleared and now.values[name] is None):
            num_gradients += 1
    report = getattr(error, "report", None)
    if num_gradients and num_gradients != getattr(report, "num_torn_gradients", 0):
        wrong.append(f"{num_gradients} gradients")
    return f"wrong: stopped with {wrong[:3]}" if wrong else "stopped_cleanly"


def _attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, probe: SimulatedProbe
) -> rematic.Session:
    op_retry: Any = {"op": "always", "all": "auto"}.get(setting.level, "never")
    attempts = 4 if setting.level in ("step", "all") else 1
    recipe = Recipe(
        policy=PolicyConfig(op_retry=op_retry), control=ControlConfig(attempts=attempts)
    )
    policy = Policy(name=setting.action, default=ACTIONS[setting.action]())
    return rematic.attach(
        model, optimizer, recipe=recipe, policy=policy, budget="64GiB", probe=probe
    )


@contextlib.contextmanager
def _answers(level: str) -> Iterator[None]:
    """Leaves out the retry of units where another level is looked at alone."""
    if level in ("unit", "all"):
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


def _differ(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is not b
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    return not torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def _is_float(value: torch.Tensor | None) -> bool:
    return value is not None and value.is_floating_point()


def _distance(
    found: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor | None], kind: str
) -> float:
    """Returns the relative distance of all tensors of a kind together."""
    pairs = [(found[n], b) for n, b in wanted.items() if n.startswith(kind) and _is_float(b)]
    if any(a is None for a, _ in pairs):
        return float("inf")
    apart = sum(float((a - b).square().sum()) for a, b in pairs if a is not None and b is not None)
    size = sum(float(b.square().sum()) for _, b in pairs if b is not None)
    return (apart / size) ** 0.5 if size else 0.0
