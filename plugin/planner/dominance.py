"""Options that no plan needs, because another one is as good in everything."""

from __future__ import annotations

from collections.abc import Sequence

from rematic.planner.problem import Option


def undominated(options: Sequence[Option]) -> tuple[int, ...]:
    """Returns the positions of the options that no other one beats; of equals the first.

    Judged by what the peak formula reads: bytes kept, and the rise of forward and of backward
    above what units before it keep; what callers hold on to; and by seconds. What is moved has been
    judged before.

    Args:
        options: Options of one unit.
    """
    return tuple(
        i
        for i, option in enumerate(options)
        if not any(
            _beats(other, option) and (j < i or not _beats(option, other))
            for j, other in enumerate(options)
            if j != i
        )
    )


def _beats(one: Option, other: Option) -> bool:
    return (
        one.seconds <= other.seconds
        and one.kept_bytes <= other.kept_bytes
        and one.forward_bytes + one.cast_bytes <= other.forward_bytes + other.cast_bytes
        and one.late_bytes + one.cast_bytes <= other.late_bytes + other.cast_bytes
        and one.kept_bytes + one.backward_bytes <= other.kept_bytes + other.backward_bytes
    )
