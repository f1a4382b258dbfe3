"""What was measured of a step of one shape, before seconds are known: the input of the frontier.

Plain values. Times come later, as a function from an op to seconds, so that one measurement serves
every device.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematic.planner.problem import FixedBytes, Surroundings


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """One op of a unit's forward, in the order of the calls."""

    name: str
    """Qualified name without overload, such as `aten::mm`."""

    occurrence: int
    """How many ops of that name ran before it in the unit's forward."""

    result_bytes: int
    """Bytes of the storages that it makes; 0 for views and in-place ops."""

    flops: int
    """Floating-point operations, a multiplication with addition counted as two."""

    touched_bytes: int
    """Bytes that it reads and writes."""

    dtype: str = "float32"
    """What it computes in, as torch names it: `float32`, `bfloat16`."""

    storage_of: int | None = None
    """Position of the op whose result it is a view of, or writes to; None if it makes its own, or
    if the storage comes from outside the unit (an argument, a weight)."""

    is_in_place: bool = False
    """Whether it writes to a storage that exists already."""

    is_random: bool = False
    """Whether it draws random numbers."""

    is_replayed: bool = True
    """Whether a replay comes as far as this op: it stops when the last saved tensor is there."""

    is_saved: bool = True
    """Whether autograd saves its storage, so that `keep` holds it until backward."""

    freed_after: int | None = None
    """Position of the op after which its storage is free again in a forward in which nothing is
    kept; None if it lives to the end, as the unit's output does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionBytes:
    """The bytes of one action; the fields are those of `Option`."""

    kept: int
    """Bytes more that are live after the unit's forward than before it."""

    forward: int
    """How far its forward rises above its start."""

    backward: int
    """How far its backward rises above its start."""

    gradient: int
    """What its backward leaves behind."""

    moved: int = 0
    """Bytes that move away and come back."""

    cast: int = 0
    """Copies of weights that autocast makes in its forward and lets go after the loss."""

    late: int = 0
    """Bytes of its input that it lets go but its callers hold until the last unit has run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """One class of units: those that cost the same at this shape."""

    name: str
    """Class name, with what sets it apart: `LlamaDecoderLayer`, `LlamaDecoderLayer (last)`."""

    actions: tuple[tuple[str, ActionBytes], ...]
    """Bytes by action name, as far as the action was measured; `keep` and `recompute` at least.
    `selective` is not among them: its bytes follow from `recompute` and the ops."""

    ops: tuple[OpCost, ...]
    """The ops of its forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """A step of one shape."""

    batch: int
    """Sequences."""

    length: int
    """Tokens of each sequence, padding included."""

    padded: bool
    """Whether a mask hides some of them."""

    fixed: FixedBytes
    """What is live when the step starts."""

    around: Surroundings
    """What happens outside the units."""

    around_ops: tuple[OpCost, ...]
    """Ops of a forward outside the units: embedding, head, loss."""

    classes: tuple[UnitCosts, ...]
    """The classes of units."""

    unit_classes: tuple[int, ...]
    """For each unit the position of its class, in the order of the forward calls."""

    unit_names: tuple[str, ...]
    """Qualified name of each unit."""
