"""What a plan is made from, for batches of one shape, and the formula that judges plans.

A step is a chain of intervals: embedding, forward of each unit in the order of the calls, head and
loss, backward of each unit in reverse, backward of the embedding, optimizer step. Of each interval
two numbers are known: how far it rises above the bytes that were live when it began, and how many
bytes more are live when it ends. What runs between two units (the end of an encoder, the start of a
decoder) belongs to the interval of the unit after it in forward, and so it does in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rematic.policy import Action

Place: TypeAlias = Literal[
    "embedding forward",
    "unit forward",
    "head",
    "unit backward",
    "embedding backward",
    "optimizer",
]
"""An interval of a step; `head` is final norm, head and loss, forward and backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What one action of one unit costs."""

    action: Action
    """The action; of `selective` with the very op occurrences that it keeps."""

    kept_bytes: int
    """Bytes more that are live after the unit's forward than before it: what it keeps for backward,
    and its output."""

    forward_bytes: int
    """How far its forward rises above what was live at its start."""

    backward_bytes: int
    """How far its backward (with a replay, or with what must come back) rises above what was live
    at its start, its own kept bytes among that."""

    gradient_bytes: int
    """Bytes that its backward leaves behind, the unit's kept bytes being gone: gradients of its
    weights. Live after it = live before it - kept + gradient. Below 0 where it also frees tensors
    from outside, such as the output of the unit before it."""

    seconds: float
    """Time of the step beyond that with `keep`."""

    moved_bytes: int = 0
    """Bytes that it moves to host memory or disk in forward and back in backward."""

    cast_bytes: int = 0
    """Copies of weights that autocast makes in its forward and lets go when forward has ended; they
    are in no other number of it."""

    late_bytes: int = 0
    """Bytes of its input that it lets go but its callers hold until the last unit has run; they are
    in no other number of it. Below 0 where its forward lets go what they held of units before."""

    def __post_init__(self) -> None:
        for name in ("kept_bytes", "forward_bytes", "backward_bytes", "moved_bytes", "seconds"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(
                    f"the option {self.action} has {name} {value}: expected a number from 0 on."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBytes:
    """What is live when a step starts."""

    weights: int = 0
    """Parameters and buffers, master weights included."""

    gradients: int = 0
    """Gradients that are there already: of earlier micro-batches, or buckets that stay."""

    optimizer: int = 0
    """State of the optimizer; what does not exist before the first step is reserved here."""

    other: int = 0
    """Everything else: the batch, caches of cast weights, what a library holds."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.other


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The intervals outside the units; all are bytes."""

    embedding_forward: int = 0
    """How far everything before the first unit rises above what was live at the step's start."""

    embedding_kept: int = 0
    """What it leaves behind: the input of the first unit, masks, position tables."""

    head: int = 0
    """How far final norm, head and loss rise, forward and backward, above what was live when the
    last unit's forward had ended."""

    head_left: int = 0
    """What they leave behind for the backward of the last unit: gradients of head and of its input;
    also what lives on to the end, such as logits that the caller holds."""

    embedding_backward: int = 0
    """How far everything after the backward of the first unit rises above what was live then."""

    embedding_gradient: int = 0
    """What that leaves behind, `embedding_kept` being gone; below 0 where it frees more than it
    leaves, as `gradient_bytes` of an option."""

    optimizer: int = 0
    """How far the step of the optimizer rises above weights, gradients and its state."""

    casts: int = 0
    """Copies of weights that autocast makes and lets go if nothing is kept, of all units: they are
    in `head` and, but for its own, in `forward_bytes` of each option. A unit that is kept holds its
    copies among its kept bytes."""

    head_uncast: int | None = None
    """How far the head rises after autocast is left; None without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Everything a plan for batches of one shape is decided from."""

    fixed: FixedBytes
    """What is live when the step starts."""

    around: Surroundings
    """What happens outside the units."""

    units: tuple[tuple[Option, ...], ...]
    """Options of each unit, in the order of the forward calls; units of one class share one tuple,
    which also saves work. The order of the options breaks ties."""

    def __post_init__(self) -> None:
        for i, options in enumerate(self.units):
            if not options:
                raise ValueError(f"unit {i} has no option: expected at least one, such as keep.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The highest number of live bytes in a step or an interval of it, and what it is made of."""

    total: int
    """Bytes live at that moment; the sum of the parts below."""

    place: Place
    """The interval in which it lies; of several equal ones the first."""

    unit: int | None
    """Position of the unit in whose interval it lies; None outside units."""

    fixed: int
    """Bytes that were live when the step started."""

    kept: int
    """Bytes that units and embedding keep at that moment."""

    gradients: int
    """Bytes that head and the backward of later units have left behind by then."""

    working: int
    """Bytes of the interval itself: what comes and goes inside it."""


def peak_of(problem: Problem, assignment: Sequence[int]) -> Peak:
    """Returns the peak of the step under an assignment, the first of equals.

    Every plan is judged by it.

    Args:
        problem: The problem.
        assignment: For each unit the position of its option.

    Raises:
        ValueError: If the assignment is not one option for each unit.
    """
    return max(intervals_of(problem, assignment), key=lambda interval: interval.total)


def intervals_of(problem: Problem, assignment: Sequence[int]) -> Iterator[Peak]:
    """Yields the highest moment of each interval of the step, in order.

    P = max(P, L + transient), then L += what is left, from the embedding to the optimizer.

    Args:
        problem: The problem.
        assignment: For each unit the position of its option.

    Raises:
        ValueError: If the assignment is not one option for each unit.
    """
    chosen = chosen_options(problem, assignment)
    around, fixed = problem.around, problem.fixed.total
    kept, left, casts, late = 0, 0, 0, 0

    def interval(place: Place, working: int, unit: int | None = None) -> Peak:
        return Peak(
            total=fixed + kept + left + working,
            place=place,
            unit=unit,
            fixed=fixed,
            kept=kept,
            gradients=left,
            working=working,
        )

    yield interval("embedding forward", around.embedding_forward)
    kept += around.embedding_kept
    for i, option in enumerate(chosen):
        others = around.casts - option.cast_bytes  # as if no unit were kept, and all had run
        yield interval("unit forward", max(0, option.forward_bytes - others + casts + late), i)
        kept += option.kept_bytes
        casts += option.cast_bytes
        late += option.late_bytes
    yield interval("head", _head(around, casts))
    left += around.head_left
    for i in range(len(chosen) - 1, -1, -1):
        yield interval("unit backward", chosen[i].backward_bytes, i)
        kept -= chosen[i].kept_bytes
        left += chosen[i].gradient_bytes
    yield interval("embedding backward", around.embedding_backward)
    kept -= around.embedding_kept
    left += around.embedding_gradient
    yield interval("optimizer", around.optimizer)


def _head(around: Surroundings, casts: int) -> int:
    """Returns how far the head rises where units hold so many bytes of copies of weights."""
    if around.head_uncast is None:
        return around.head
    return max(0, around.head - around.casts + casts, around.head_uncast)


def chosen_options(problem: Problem, assignment: Sequence[int]) -> list[Option]:
    """Returns the option of each unit.

    Raises:
        ValueError: If the assignment is not one option for each unit.
    """
    if len(assignment) != len(problem.units):
        raise ValueError(
            f"the assignment speaks of {len(assignment)} units but the problem has "
            f"{len(problem.units)}: expected one option for each."
        )
    for i, (choice, options) in enumerate(zip(assignment, problem.units, strict=True)):
        if not 0 <= choice < len(options):
            raise ValueError(
                f"unit {i} has no option {choice}: expected a position from 0 to "
                f"{len(options) - 1}."
            )
    return [options[choice] for options, choice in zip(problem.units, assignment, strict=True)]


def seconds_of(problem: Problem, assignment: Sequence[int]) -> float:
    """Returns the time of the step beyond that with everything kept.

    Raises:
        ValueError: If the assignment is not one option for each unit.
    """
    return sum(option.seconds for option in chosen_options(problem, assignment))


def moved_bytes_of(problem: Problem, assignment: Sequence[int]) -> int:
    """Returns the bytes that are away from the device when forward has ended.

    Raises:
        ValueError: If the assignment is not one option for each unit.
    """
    return sum(option.moved_bytes for option in chosen_options(problem, assignment))
