"""What a step costs, as polynomials in batch size and length: plain values, evaluated in no time.

A profile is made by `trace_profile` and knows no torch. `costs_at` answers for one shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rematic.cost.polynomial import Envelope, Polynomial
from rematic.cost.tiling import TiledEnvelope, Tiling
from rematic.planner import ActionBytes, FixedBytes, OpCost, StepCosts, Surroundings, UnitCosts


@dataclass(frozen=True, kw_only=True)
class Moving:
    """How tensors move to host memory or disk."""

    min_bytes: int
    """Size from which a storage moves; smaller ones stay."""

    prefetches: bool
    """Whether what a unit moved comes back while the one after it is at work (accelerators)."""


@dataclass(frozen=True, kw_only=True)
class Returns:
    """A part of a unit's backward, in which some of what it moved has come back and is gone."""

    gone: tuple[int, ...]
    """Positions of those storages among the ones that the unit offers to move."""

    rise: Envelope
    """How far it rises above the start of the whole backward, all of them having moved."""


@dataclass(frozen=True, kw_only=True)
class ActionProfile:
    """The bytes of one action of one unit; most fields are those of `ActionBytes`."""

    kept: Polynomial
    forward: Envelope
    backward: Envelope
    gradient: Polynomial
    cast: Polynomial = field(default_factory=lambda: Polynomial.constant(0))
    late: Polynomial = field(default_factory=lambda: Polynomial.constant(0))
    offered: tuple[tuple[Polynomial, bool], ...] = ()
    """Storages that the unit would move, and whether those of the traced steps were."""
    returns: tuple[Returns, ...] = ()
    """Backward in parts, for storages that are too small to move: they are freed in it."""

    def at(self, batch: int, length: int, moving: Moving) -> ActionBytes:
        """Returns the bytes at one shape.

        Args:
            batch: Sequences.
            length: Tokens of each.
            moving: How tensors move.
        """
        moved, staying = 0, []
        for polynomial, was_moved in self.offered:
            num_bytes = polynomial(batch, length)
            is_moved = num_bytes >= moving.min_bytes
            moved += num_bytes if is_moved else 0
            staying.append(num_bytes * (was_moved - is_moved))
        backward = self.backward(batch, length)
        if any(staying) and self.returns and not moving.prefetches:
            backward = max(
                part.rise(batch, length) - sum(staying[i] for i in part.gone)
                for part in self.returns
            )
        return ActionBytes(
            kept=self.kept(batch, length) + sum(staying),
            forward=self.forward(batch, length),
            backward=max(0, backward) + (moved if moving.prefetches else 0),
            gradient=self.gradient(batch, length),
            moved=moved,
            cast=self.cast(batch, length),
            late=self.late(batch, length),
        )


@dataclass(frozen=True, kw_only=True)
class OpProfile:
    """One op; `fixed` holds what does not depend on the shape."""

    fixed: OpCost
    result_bytes: Polynomial
    flops: Polynomial
    touched_bytes: Polynomial

    def at(self, batch: int, length: int) -> OpCost:
        """Returns the op at one shape."""
        return replace(
            self.fixed,
            result_bytes=self.result_bytes(batch, length),
            flops=self.flops(batch, length),
            touched_bytes=self.touched_bytes(batch, length),
        )


@dataclass(frozen=True, kw_only=True)
class TiledOps:
    """The ops of one slice of a loss, which run again for every slice."""

    tiling: Tiling
    """How the loss is sliced."""

    num_traced: int
    """Number of slices in the traced steps."""

    ops: tuple[OpProfile, ...]
    """Of one of these slices."""

    def at(self, batch: int, length: int) -> tuple[OpCost, ...]:
        """Returns the ops of all slices at one shape.

        Work and bytes are those of the traced slices, spread over the real ones.
        """
        num_tiles = self.tiling.num_tiles(batch * length)
        share = self.num_traced / num_tiles
        one = [op.at(batch, length) for op in self.ops]
        scaled = tuple(
            replace(
                op,
                result_bytes=round(op.result_bytes * share),
                flops=round(op.flops * share),
                touched_bytes=round(op.touched_bytes * share),
            )
            for op in one
        )
        return scaled * num_tiles


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """One slot: a unit that stands for all that cost the same."""

    name: str
    """As `UnitCosts.name`."""

    actions: tuple[tuple[str, ActionProfile], ...]
    """By action name."""

    ops: tuple[OpProfile, ...]
    """Of its forward."""

    def actions_at(
        self, batch: int, length: int, moving: Moving
    ) -> tuple[tuple[str, ActionBytes], ...]:
        """Returns the bytes of each action at one shape.

        Where all tensors are too small to move, an action that moves them is the one without.
        """
        found = {name: action.at(batch, length, moving) for name, action in self.actions}
        for name, without in (("offload", "keep"), ("recompute+offload", "recompute")):
            if name in found and not found[name].moved:
                found[name] = found[without]
        return tuple(found.items())


@dataclass(frozen=True, kw_only=True)
class SurroundingsProfile:
    """What happens outside the units; the fields are those of `Surroundings`."""

    embedding_forward: Envelope
    embedding_kept: Polynomial
    head: Envelope | TiledEnvelope
    head_left: Polynomial
    embedding_backward: Envelope
    embedding_gradient: Polynomial
    casts: Polynomial
    head_uncast: Envelope | TiledEnvelope | None

    def at(self, batch: int, length: int, *, optimizer: int) -> Surroundings:
        """Returns the bytes at one shape."""
        return Surroundings(
            embedding_forward=self.embedding_forward(batch, length),
            embedding_kept=self.embedding_kept(batch, length),
            head=self.head(batch, length),
            head_left=self.head_left(batch, length),
            embedding_backward=self.embedding_backward(batch, length),
            embedding_gradient=self.embedding_gradient(batch, length),
            optimizer=optimizer,
            casts=self.casts(batch, length),
            head_uncast=None if self.head_uncast is None else self.head_uncast(batch, length),
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of shapes in which a step takes one path, padded or not."""

    min_batch: int
    """Smallest batch size. (One sequence alone is a case of its own: some of its views need a copy
    where there are several.)"""

    max_batch: int | None
    """Largest batch size; None without an end."""

    min_length: int
    """First length in tokens."""

    max_length: int | None
    """Last length; None without an end."""

    padded: bool
    """Whether a mask hides some tokens."""

    batch_bytes: Polynomial
    """Bytes of the batch."""

    around: SurroundingsProfile
    """Outside the units."""

    around_ops: tuple[OpProfile | TiledOps, ...]
    """Ops of a forward outside the units."""

    units: tuple[UnitProfile, ...]
    """One for each slot."""

    def holds(self, batch: int, length: int, *, padded: bool) -> bool:
        """Returns whether a shape lies in it."""
        return (
            self.padded == padded
            and self.min_batch <= batch <= (self.max_batch or batch)
            and self.min_length <= length <= (self.max_length or length)
        )

    def __str__(self) -> str:
        batches = _range(self.min_batch, self.max_batch)
        lengths = _range(self.min_length, self.max_length)
        return f"{batches} x {lengths}, {'padded' if self.padded else 'not padded'}"


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """What a step of a model costs at every shape."""

    pieces: tuple[Piece, ...]
    """By rising length, for each kind of padding."""

    fixed: FixedBytes
    """What is live when a step starts, without the batch."""

    optimizer_bytes: int
    """How far the optimizer's step rises above weights, gradients and its state."""

    unit_names: tuple[str, ...]
    """Qualified names, in the order of the forward calls."""

    unit_classes: tuple[int, ...]
    """For each unit its slot."""

    moving: Moving
    """How tensors move."""

    def costs_at(self, *, batch: int, length: int, padded: bool = False) -> StepCosts:
        """Returns the costs of a step of one shape.

        Raises:
            ValueError: If the shape is outside of what was traced.
        """
        piece = self._piece(batch, length, padded=padded)
        return StepCosts(
            batch=batch,
            length=length,
            padded=padded,
            fixed=replace(self.fixed, other=self.fixed.other + piece.batch_bytes(batch, length)),
            around=piece.around.at(batch, length, optimizer=self.optimizer_bytes),
            around_ops=tuple(_flat(op.at(batch, length) for op in piece.around_ops)),
            classes=tuple(
                UnitCosts(
                    name=unit.name,
                    actions=unit.actions_at(batch, length, self.moving),
                    ops=tuple(op.at(batch, length) for op in unit.ops),
                )
                for unit in piece.units
            ),
            unit_classes=self.unit_classes,
            unit_names=self.unit_names,
        )

    def _piece(self, batch: int, length: int, *, padded: bool) -> Piece:
        for piece in self.pieces:
            if piece.holds(batch, length, padded=padded):
                return piece
        raise ValueError(
            f"the profile holds no batch of {batch} x {length} tokens that is "
            f"{'padded' if padded else 'not padded'}: expected one of "
            f"{'; '.join(map(str, self.pieces))}. Trace it for that."
        )


def _flat(ops: Iterable[OpCost | tuple[OpCost, ...]]) -> Iterator[OpCost]:
    for op in ops:
        if isinstance(op, tuple):
            yield from op
        else:
            yield op


def _range(first: int, last: int | None) -> str:
    return str(first) if first == last else f"{first} to {'any' if last is None else last}"


def names_of_slots(classes: Sequence[str], positions: Sequence[int]) -> tuple[str, ...]:
    """Returns a name for each slot: the class, with the unit's position where it is not alone."""
    return tuple(
        name if classes.count(name) == 1 else f"{name} (as unit {position})"
        for name, position in zip(classes, positions, strict=True)
    )
