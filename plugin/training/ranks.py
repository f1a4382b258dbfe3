"""The processes of a run that trains on several devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rematic.recipes import Recipe

RUN_VARIABLE = "REMATIC_RUN_DIRECTORY"
"""Environment variable by which the first process tells the others where the run is."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands among those of a run."""

    rank: int
    """Its number, from 0."""
    num_ranks: int
    """How many there are."""
    run_path: str | None
    """Folder of the run as the first one made it; None for the first one itself."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run leaves behind."""
        return self.rank == 0


def find_ranks(recipe: Recipe) -> Ranks:
    """Reads what Lightning's launcher says to the processes that it starts.

    Raises:
        ValueError: Another launcher has started this process.
    """
    num_ranks = recipe.distributed.devices
    rank = int(os.environ.get("LOCAL_RANK", "0")) if num_ranks > 1 else 0
    run_path = os.environ.get(RUN_VARIABLE)
    if rank == 0:
        return Ranks(rank=0, num_ranks=num_ranks, run_path=None)
    if run_path is None:
        raise ValueError(
            f"LOCAL_RANK is {rank}, but {RUN_VARIABLE} is not set; expected to start the other "
            "processes: run rematic train alone, without torchrun, srun or accelerate launch"
        )
    return Ranks(rank=rank, num_ranks=num_ranks, run_path=run_path)


class NoJournal:
    """The journal of a process that writes none."""

    def write(self, event: Mapping[str, object]) -> None:
        """Takes nothing down."""

    def close(self) -> None:
        """Has nothing to close."""
