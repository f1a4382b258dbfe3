"""From traces of one action at the points of a grid to polynomials."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest

from rematic.cost.event_log import Interval
from rematic.cost.op_log import LoggedOp
from rematic.cost.polynomial import Envelope, Grid, Polynomial
from rematic.cost.profile import ActionProfile, OpProfile, Returns, SurroundingsProfile, TiledOps
from rematic.cost.step_trace import AFTER, EMBEDDING, HEAD, StepTrace
from rematic.cost.tiling import FEW_TILES, TiledEnvelope, Tiling
from rematic.planner import OpCost

_ZERO = Polynomial.constant(0)


class PathDiffers(ValueError):
    """The step took another path at another shape, so that its events cannot be compared."""


class Fit:
    """Traces of one action at all points of a grid.

    Args:
        grid: Where the step was traced.
        traces: One for each point, in the order of `grid.points`.

    Raises:
        PathDiffers: If the ops of the traces are not the same.
    """

    def __init__(self, grid: Grid, traces: Sequence[StepTrace]) -> None:
        self._grid = grid
        self._traces = traces
        self._known: dict[tuple[int, ...], Polynomial] = {}
        self._names = [interval.name for interval in traces[0].intervals]
        first = [interval.ops for interval in traces[0].intervals]
        for trace, point in zip(traces, grid.points, strict=True):
            names = [interval.name for interval in trace.intervals]
            if names != self._names or [interval.ops for interval in trace.intervals] != first:
                raise PathDiffers(
                    f"a step of {point[0]} x {point[1]} tokens runs other ops than one of "
                    f"{grid.points[0][0]} x {grid.points[0][1]}."
                )

    @property
    def is_linear(self) -> bool:
        """Whether no event grows faster than with the length."""
        for name in self._names:
            self._rise(name)
        return all(polynomial.degree <= 1 for polynomial in self._known.values())

    def casts(self, counts: Sequence[int]) -> Polynomial:
        """Returns the bytes of autocast's copies of weights that nobody saves, of all units.

        Args:
            counts: For each slot the number of units for which it stands.
        """
        return self._through(
            [sum(map(operator.mul, counts, trace.cast_bytes)) for trace in self._traces]
        )

    def action(self, slot: int, *, casts: Polynomial = _ZERO) -> ActionProfile:
        """Returns what the action costs in one slot.

        Args:
            slot: Which unit.
            casts: Copies of weights that other units may hold while it runs.
        """
        forward, backward = f"forward {slot}", f"backward {slot}"
        # What a unit let go but the caller's variables hold until the head is reached is no part of
        # what it keeps: it is gone in backward.
        late = self._through([trace.late_bytes[slot] for trace in self._traces])
        own_casts = self._through([trace.cast_bytes[slot] for trace in self._traces])
        kept = self._growth(forward) - late - own_casts
        return ActionProfile(
            kept=kept,
            forward=self._rise(forward, plus=casts - own_casts),
            backward=self._rise(backward),
            gradient=self._growth(backward) + kept,
            cast=own_casts,
            late=late,
            offered=self._offered(slot),
            returns=self._returns(slot),
        )

    def _returns(self, slot: int) -> tuple[Returns, ...]:
        """Returns backward in parts, each until more of what came back is gone again."""
        gone = self._traces[0].returned[slot]
        if all(events is None for events in gone):
            return ()
        cuts = [0, *sorted({events for events in gone if events is not None})]
        return tuple(
            Returns(
                gone=tuple(i for i, at in enumerate(gone) if at is not None and at <= start),
                rise=Envelope.over(
                    self._events(f"backward {slot}", plus=_ZERO, start=start, end=end)
                ),
            )
            for start, end in zip_longest(cuts, cuts[1:])
        )

    def _offered(self, slot: int) -> tuple[tuple[Polynomial, bool], ...]:
        """Returns the storages that a unit offers to move, and whether the traces moved them."""
        versions = zip(*(trace.offered[slot] for trace in self._traces), strict=True)
        return tuple(
            (self._through([storage.num_bytes for storage in sizes]), sizes[0].is_taken)
            for sizes in versions
        )

    def around(
        self, counts: Sequence[int], *, sliced: tuple[Fit, Tiling] | None = None
    ) -> SurroundingsProfile:
        """Returns what happens outside the units.

        Args:
            counts: For each slot the number of units for which it stands.
            sliced: The same traces with `MANY_TILES` slices of the loss instead of `FEW_TILES`, and
                how it is sliced; None where it is not.
        """
        kept = self._growth(EMBEDDING)
        casts = self.casts(counts)
        many = None if sliced is None else sliced[0]
        tiling = None if sliced is None else sliced[1]
        return SurroundingsProfile(
            embedding_forward=self._rise(EMBEDDING),
            embedding_kept=kept,
            head=self._head(many, tiling, plus=casts, uncast=False),
            head_left=self._growth(HEAD) + self.casts([1] * len(counts)),
            embedding_backward=self._rise(AFTER),
            embedding_gradient=self._growth(AFTER) + kept,
            casts=casts,
            head_uncast=self._head(many, tiling, plus=casts, uncast=True) if casts.terms else None,
        )

    def _head(
        self, many: Fit | None, tiling: Tiling | None, *, plus: Polynomial, uncast: bool
    ) -> Envelope | TiledEnvelope:
        """Returns how far the head rises.

        Args:
            many: The same traces with `MANY_TILES` slices of the loss, if it is sliced.
            tiling: How it is sliced.
            plus: Copies of all units' weights, which are there until autocast is left.
            uncast: Whether it is asked for the time after that.
        """
        traced = self.casts([1] * len(self._traces[0].cast_bytes))
        left = self._traces[0].num_before_uncast if plus.terms else None
        part = slice(left, None) if uncast else slice(0, left)
        plus = traced if uncast else plus
        few = list(self._events(HEAD, plus=plus, start=part.start, end=part.stop))
        if many is None or tiling is None:
            return Envelope.over(few)
        num_forward = self._traces[0].num_before_backward
        return TiledEnvelope.through(
            few,
            list(many._events(HEAD, plus=plus, start=part.start, end=part.stop)),
            num_forward=max(0, num_forward - (part.start or 0)),
            tiling=tiling,
        )

    def batch_bytes(self) -> Polynomial:
        """Returns the bytes of the batch."""
        return self._through([trace.batch_bytes for trace in self._traces])

    def around_ops(self, tiling: Tiling | None = None) -> tuple[OpProfile | TiledOps, ...]:
        """Returns the ops of a forward outside the units.

        Args:
            tiling: How the loss is sliced; None where it is not.
        """
        logs = zip(*(trace.around_ops for trace in self._traces), strict=True)
        ops = tuple(self._op(versions, versions[0]) for versions in logs)
        repeated = self._traces[0].repeated_ops
        if tiling is None or repeated is None:
            return ops
        first, start, stop = repeated
        one = TiledOps(tiling=tiling, num_traced=FEW_TILES, ops=ops[start:stop])
        return (*ops[:first], one, *ops[stop:])

    def unit_ops(self, slot: int, *, kept: Fit) -> tuple[OpProfile, ...]:
        """Returns the ops of a unit's forward, these being traces of `recompute`.

        Args:
            slot: Which unit.
            kept: The traces of `keep`, which show what autograd saves. They are at enough lengths
                for the work of an op, which may grow with the square where bytes do not.
        """
        stop = self._traces[0].num_replayed[slot]
        ops = self._traces[0].unit_ops[slot]
        logs = zip(*(trace.unit_ops[slot] for trace in kept._traces), strict=True)
        return tuple(
            kept._op(log, replace(op, is_saved=log[0].is_saved), is_replayed=i < stop)
            for i, (op, log) in enumerate(zip(ops, logs, strict=True))
        )

    def _op(
        self, versions: Sequence[LoggedOp], model: LoggedOp, *, is_replayed: bool = True
    ) -> OpProfile:
        return OpProfile(
            fixed=OpCost(**asdict(model), is_replayed=is_replayed),
            result_bytes=self._through([op.result_bytes for op in versions]),
            flops=self._through([op.flops for op in versions]),
            touched_bytes=self._through([op.touched_bytes for op in versions]),
        )

    def _intervals(self, name: str) -> list[Interval]:
        if name not in self._names:  # a first unit whose input needs no gradient ends the step
            return []
        position = self._names.index(name)
        return [trace.intervals[position] for trace in self._traces]

    def _growth(self, name: str) -> Polynomial:
        intervals = self._intervals(name)
        if not intervals:
            return Polynomial.constant(0)
        return self._through([interval.end_bytes - interval.start_bytes for interval in intervals])

    def _rise(self, name: str, plus: Polynomial = _ZERO) -> Envelope:
        """Returns how far the events of an interval rise above its start."""
        return Envelope.over(self._events(name, plus=plus))

    def _events(
        self, name: str, *, plus: Polynomial, start: int = 0, end: int | None = None
    ) -> Iterator[Polynomial]:
        """Yields how high each event of an interval, or of a part of it, lies above its start."""
        intervals = self._intervals(name)
        starts = [interval.start_bytes for interval in intervals]
        for event in zip(*(i.live_bytes[start:end] for i in intervals), strict=True):
            yield self._through([n - base for n, base in zip(event, starts, strict=True)]) + plus

    def _through(self, values: Sequence[int]) -> Polynomial:
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._grid.fit(key)
        return self._known[key]
