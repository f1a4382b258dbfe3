"""What the ranks exchange in a step beside what their wrapper exchanges.

One rank that runs its step again alone must not exchange anything a second time: the others would
take it for something else. The group counts its collectives, so that they are seen.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from rematic.activations.torch_private import number_of_collectives


class ForeignCollectives:
    """Looks for collectives that neither the wrapper nor a host has answered for.

    Args:
        group: The group of the wrapper.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.found = False
        """Whether there were any."""
        self._groups = [group]
        world = torch.distributed.group.WORLD
        if world is not None and world is not group:
            self._groups.append(world)
        self._allowed = self._number()

    def look(self) -> None:
        """Notes those that ran since the last call here or of `allow`."""
        number = self._number()
        self.found |= number != self._allowed
        self._allowed = number

    def allow(self) -> None:
        """Answers for those that ran since the last call here or of `look`."""
        self._allowed = self._number()

    def _number(self) -> list[int | None]:
        return [number_of_collectives(group) for group in self._groups]
