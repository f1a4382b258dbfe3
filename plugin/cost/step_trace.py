"""Runs one step of a fake model under given actions and writes down its live bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rematic.activations import Engine
from rematic.activations.record import Record
from rematic.activations.replay import replaying
from rematic.batch_shape import default_batch_shape
from rematic.cost.event_log import EventLog, Interval
from rematic.cost.fake_model import fake_copy, shorten
from rematic.cost.op_log import LoggedOp, OpLog
from rematic.cost.real_path import accelerators_8_bits, on_real_path
from rematic.cost.real_twins import RealTwins
from rematic.cost.tiling import FEW_TILES
from rematic.cost.torch_private import make_fake_mode
from rematic.cost.traced_stash import Offered, TracedPlaces
from rematic.cost.traced_tiles import TracedTiles
from rematic.memory.storages import storages_of
from rematic.policy import (
    Action,
    Compress,
    Keep,
    Offload,
    Plan,
    Recompute,
    RecomputeOffload,
    Selective,
)

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]
"""Runs the forward of a model on a batch and returns the loss."""

WARMING_FORWARDS = 2
"""Forwards after which units read nothing anew before a call: the second one copies what objects
in modules hold, such as the scales of quantized weights, which has only to be looked at later."""

EMBEDDING, HEAD, AFTER = "embedding", "head", "embedding backward"
"""Names of the intervals outside units."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One step of one shape under one assignment of actions."""

    intervals: tuple[Interval, ...]
    """In order: embedding, forward of each unit, head, backward of each in reverse, the rest."""

    unit_ops: tuple[tuple[LoggedOp, ...], ...]
    """Ops of each unit's forward."""

    num_replayed: tuple[int, ...]
    """For each unit the number of ops that its replay ran, 0 without one."""

    around_ops: tuple[LoggedOp, ...]
    """Ops of the forward outside units."""

    offered: tuple[tuple[Offered, ...], ...]
    """Storages that each unit would move away, if they are large enough."""

    returned: tuple[tuple[int | None, ...], ...]
    """For each of them the number of events of the unit's backward before what came back of it was
    gone again; None where nothing did, or where it was there to the end."""

    late_bytes: tuple[int, ...]
    """Bytes of each unit's input that it let go but that died after its forward, less those of
    others that died in its own: until then the variables of callers held them."""

    cast_bytes: tuple[int, ...]
    """Bytes of copies of weights that autocast made in each unit and let go when it was left, after
    the loss. (Those that autograd saves live on, and are kept like everything else.)"""

    num_before_uncast: int
    """Number of ops of the head's interval that ran while these copies were there."""

    num_before_backward: int
    """Number of ops of the head's interval that belong to forward."""

    batch_bytes: int
    """Bytes of the batch."""

    repeated_ops: tuple[int, int, int] | None = None
    """Where among the ops outside units the first slice of the loss begins, the second one, and
    where that ends; None without slices."""


class TracedModel:
    """A model of fake tensors whose steps can be run under any actions, at any shape.

    Args:
        model: The model, live or on the device `meta`; it is copied without its weights.
        unit_names: Qualified names of all its units.
        kept: Positions of the units to trace; the others are left out of the copy.
        patterns: Patterns that name the units, as for `Engine`.
        loss: Runs the forward and returns the loss.
        autocast: What autocast computes in, None without it.
        on_accelerator: Whether what was moved takes memory when it comes back.
        tile_tokens: Tokens in a slice of a tiled loss, 0 for the default; None: not tiled.
    """

    def __init__(
        self,
        model: nn.Module,
        unit_names: Sequence[str],
        kept: Sequence[int],
        *,
        patterns: Sequence[str] = (),
        loss: Loss,
        autocast: torch.dtype | None = None,
        on_accelerator: bool = True,
        tile_tokens: int | None = None,
    ) -> None:
        self._fake_mode = make_fake_mode()
        self._twins = RealTwins(self._fake_mode)
        self.model = fake_copy(model, self._twins)
        shorten(self.model, unit_names, kept)
        self.tiles = (
            None
            if tile_tokens is None
            else TracedTiles(self.model, tile_tokens=tile_tokens or None)
        )
        self._loss = loss
        self._autocast = autocast
        self._places = TracedPlaces(takes_memory=on_accelerator)
        self._engine = Engine(self.model, patterns, trust=["*"])
        self.num_units = len(self._engine.units)
        self._known: set[Action] = set()
        self._is_warm = False

    def run(
        self,
        actions: Sequence[Action],
        batch: Batch,
        *,
        accumulates: bool,
        num_tiles: int = FEW_TILES,
    ) -> StepTrace:
        """Traces one forward and backward.

        Args:
            actions: One for each unit that is traced.
            batch: Real tensors on the CPU; of floating ones only the shape is used.
            accumulates: Whether gradients of an earlier micro-batch are there already.
            num_tiles: Slices of a tiled loss.
        """
        self._warm_up(actions, batch)
        self._places.set_tokens(default_batch_shape(batch).tokens)
        self._apply(actions)
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = None
        with self._in_force():
            fakes = self._fakes(batch)
            if accumulates:
                for parameter in parameters:
                    if parameter.requires_grad:
                        parameter.grad = torch.empty_like(parameter)
            recorder = _Recorder(self._engine, self._places, parameters)
            gradients = [p.grad for p in parameters if p.grad is not None]
            recorder.log.ignore([*parameters, *self.model.buffers(), *fakes.values(), *gradients])
            with (
                self._twins,
                recorder.log,
                recorder.watching(),
                self._slicing(recorder, default_batch_shape(batch).tokens, num_tiles),
            ):
                loss = self._forward(fakes)
                recorder.begin_backward()
                loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        result = recorder.result(sum(tensor.nbytes for tensor in batch.values()))
        return result if self.tiles is None else replace(result, repeated_ops=self.tiles.repeated)

    def _slicing(
        self, recorder: _Recorder, tokens: int, num_tiles: int
    ) -> AbstractContextManager[None]:
        if self.tiles is None:
            return nullcontext()
        return self.tiles.slicing(
            tokens=tokens,
            num_tiles=num_tiles,
            position=recorder.num_around_ops,
            mute=recorder.mute,
        )

    def _warm_up(self, actions: Sequence[Action], batch: Batch) -> None:
        """Lets units learn what they learn from a call, which later calls then do otherwise."""
        if not self._is_warm:
            self._is_warm = True
            self._apply([Keep()] * len(actions))
            for _ in range(WARMING_FORWARDS):
                with self._in_force():
                    fakes = self._fakes(batch)
                    with self._twins:
                        self._forward(fakes)
        new = {action for action in actions if isinstance(action, Selective)} - self._known
        if new:
            self._known |= new
            self.run(actions, batch, accumulates=False)

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        eight_bits = accelerators_8_bits() if self._places.takes_memory else nullcontext()
        with self._fake_mode, on_real_path(), eight_bits:
            yield

    def _fakes(self, batch: Batch) -> Batch:
        return {name: self._twins.fake(tensor) for name, tensor in batch.items()}

    def _apply(self, actions: Sequence[Action]) -> None:
        """Puts actions in force, with a place for what they move that holds nothing."""
        self._engine.apply(Plan(actions=tuple(_without_moving(action) for action in actions)))
        for unit, action in zip(self._engine.units, actions, strict=True):
            unit.stash = self._places.of(action)

    def _forward(self, batch: Batch) -> torch.Tensor:
        if self._autocast is None:
            return self._loss(self.model, batch)
        with torch.autocast("cpu", dtype=self._autocast):
            return self._loss(self.model, batch)


class _Recorder:
    """Cuts a step into intervals, and takes down the ops of the forward of each unit."""

    def __init__(
        self, engine: Engine, places: TracedPlaces, parameters: Sequence[torch.Tensor]
    ) -> None:
        self.log = EventLog()
        self._engine = engine
        self._places = places
        self._num_units = len(engine.units)
        self._around = OpLog()
        self._units: list[OpLog] = []
        self._replayed = [0] * self._num_units
        self._offered: list[tuple[Offered, ...]] = []
        self._gone_at: dict[int, tuple[str, int]] = {}
        self._late = [0] * self._num_units
        self._inputs: dict[int, int] = {}
        self._weights = {id(storage) for storage in storages_of(list(parameters))}
        self._casts: dict[int, int] = {}
        self._cast_bytes = [0] * self._num_units
        self._num_before_uncast = 0
        self._num_before_backward = 0
        self._running: OpLog | None = self._around
        self._backward_of: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Cuts the step that runs in the body."""
        self.log.observer = self._observe
        self.log.on_death = self._note_death
        self._engine.ledger.after_forward = self._after_forward
        self._places.on_return_death = self._note_return_death
        with ExitStack() as stack:
            stack.callback(self._stop)
            for unit in self._engine.units:
                before = unit.module.register_forward_pre_hook(self._begin, with_kwargs=True)
                after = unit.module.register_forward_hook(self._finish)
                stack.callback(before.remove)
                stack.callback(after.remove)
            self.log.cut(EMBEDDING)
            yield
            self.log.end()

    def result(self, batch_bytes: int) -> StepTrace:
        """Returns what was taken down.

        Raises:
            ValueError: If a unit was not called exactly once.
        """
        if len(self._units) != self._num_units:
            raise ValueError(
                f"a forward of the model called units {len(self._units)} times: expected each of "
                f"the {self._num_units} once. Name the units in the recipe, so that a module that "
                "is called several times is none."
            )
        return StepTrace(
            intervals=tuple(self.log.intervals),
            unit_ops=tuple(tuple(unit.ops) for unit in self._units),
            num_replayed=tuple(self._replayed),
            around_ops=tuple(self._around.ops),
            offered=tuple(self._offered),
            returned=tuple(
                tuple(self._returned(unit, one.key) for one in offered)
                for unit, offered in enumerate(self._offered)
            ),
            late_bytes=tuple(self._late),
            cast_bytes=tuple(self._cast_bytes),
            num_before_uncast=self._num_before_uncast,
            num_before_backward=self._num_before_backward,
            batch_bytes=batch_bytes,
        )

    def num_around_ops(self) -> int:
        """Returns how many ops outside units were taken down."""
        return len(self._around.ops)

    def mute(self, is_muted: bool) -> None:
        """Leaves out what comes, or takes it down again."""
        self.log.is_muted = is_muted

    def begin_backward(self) -> None:
        """Takes note that forward has ended."""
        self._num_before_backward = len(self.log.intervals[-1].live_bytes)
        self._running = None

    def _stop(self) -> None:
        self.log.observer = self.log.on_death = self._places.on_return_death = None
        self._engine.ledger.after_forward = None

    def _observe(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ANN401
        if self._running is not None:
            self._running.note(func, args, kwargs, output)
            if func is torch.ops.aten._to_copy.default and self._running is not self._around:
                self._note_cast(args[0], output)
        elif self._backward_of is not None and replaying() and not OpLog.is_silent(func):
            self._replayed[self._backward_of] += 1

    def _note_death(self, key: int, num_bytes: int) -> None:
        position = self._inputs.pop(key, None)
        if position is not None:
            self._note_input_death(position, num_bytes)
        unit = self._casts.pop(key, None)
        if unit is not None and self.log.intervals[-1].name == HEAD:
            self._cast_bytes[unit] += num_bytes
            self._num_before_uncast = len(self.log.intervals[-1].live_bytes)
        if self._running is not None:
            self._running.note_death(key)

    def _note_return_death(self, key: int) -> None:
        interval = self.log.intervals[-1]
        self._gone_at[key] = (interval.name, len(interval.live_bytes))

    def _returned(self, unit: int, key: int) -> int | None:
        interval, events = self._gone_at.get(key, ("", 0))
        return events if interval == f"backward {unit}" else None

    def _note_cast(self, given: torch.Tensor, made: torch.Tensor) -> None:
        if id(given.untyped_storage()) in self._weights:
            self._casts[id(made.untyped_storage())] = len(self._units) - 1

    def _note_input_death(self, position: int, num_bytes: int) -> None:
        interval = self.log.intervals[-1].name
        kind, _, running = interval.partition(" ")
        if interval == HEAD:
            self._late[position] += num_bytes
        elif kind == "forward" and int(running) != position:
            self._late[position] += num_bytes
            self._late[int(running)] -= num_bytes

    def _after_forward(self, record: Record) -> None:
        held = [h.tensor for h in record.live_holders() if h.tensor is not None]
        self._units[-1].note_saved(held)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        inputs = [t for t in tree_leaves((args, kwargs)) if _is_differentiable(t)]
        if not self._units:
            self.log.cut_at_next_op("forward 0")
            if inputs:
                inputs[0].register_hook(lambda _: self._come_to(-1))
        self._inputs.update((id(t.untyped_storage()), len(self._units)) for t in inputs[:1])
        self._running = OpLog()
        self._units.append(self._running)
        self._places.offered = []

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        position = len(self._units) - 1
        self._running = self._around
        self._offered.append(tuple(self._places.offered))
        outputs = [t for t in tree_leaves(output) if _is_differentiable(t)]
        if outputs:
            outputs[0].register_hook(lambda _: self._come_to(position))
        is_last = position == self._num_units - 1
        self.log.cut_at_next_op(HEAD if is_last else f"forward {position + 1}")

    def _come_to(self, position: int) -> None:
        self._running = None
        self._backward_of = position if position >= 0 else None
        self.log.cut(f"backward {position}" if position >= 0 else AFTER)


def _without_moving(action: Action) -> Action:
    if isinstance(action, (Offload, Compress)):
        return Keep()
    return Recompute() if isinstance(action, RecomputeOffload) else action


def _is_differentiable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
