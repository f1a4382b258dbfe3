"""Moves what a record holds when its forward has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rematic.activations.record import Record
from rematic.memory import is_out_of_memory
from rematic.stash import Stash, StashError


def move_away(
    record: Record, stash: Stash, note: Callable[[str], None], *, shared: Collection[int] = ()
) -> None:
    """Moves saved tensors of a record that holds them, inputs of one that does not.

    What does not fit is recomputed instead, and noted.

    Args:
        record: The record.
        stash: Where to.
        note: Is told what stays, and why.
        shared: Positions of inputs that other calls hold as well, which stay.
    """
    try:
        if record.held:
            record.move(stash)
        elif not record.arguments.mutated_positions():
            record.move_inputs(stash, shared=shared)
        return
    except RuntimeError as error:
        if not isinstance(error, StashError) and not is_out_of_memory(error):
            raise
        note(f"its tensors stay, since they could not be moved: {error}")
    # outside `except`: what is recomputed instead needs no place
    record.evict()
