"""Saves the training of an Accelerator that is about to stop, by its own `save_state`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rematic.at_stop import refuse_to_save
from rematic.control import StopReport
from rematic.hosts.accelerate_step import HostState
from rematic.session import Session
from rematic.whole_files import replaced_when_whole

FOLDER_NAME = "rematic-emergency"
"""Name of the folder that a stopped training is saved to."""


class EmergencySaves(Protocol):
    """Makes the emergency checkpoints of a host."""

    def begin_window(self, state: HostState) -> None:
        """Takes note that the micro-batch that follows is the first of an update.

        Args:
            state: What the host has counted before it.
        """

    def end_step(self) -> None:
        """Takes note that a micro-batch is done, or that a state was loaded."""

    def save(self, session: Session, report: StopReport) -> str:
        """Saves the training as it was before the first micro-batch of the update.

        Args:
            session: The session.
            report: Why the training stops.

        Returns:
            The folder.

        Raises:
            NotSavedError: If it should not be saved.
        """


class AcceleratorSaves:
    """Makes the emergency checkpoints of a loop that has an Accelerator.

    Args:
        accelerator: The Accelerator.
        folder: Where they are saved, one at a time; None for `rematic-emergency` in its
            `project_dir`, beside the journal, or in the working folder, the first that there is.
    """

    def __init__(
        self,
        accelerator: Any,  # noqa: ANN401 - accelerate ships no types
        folder: Path | None,
    ) -> None:
        self._accelerator = accelerator
        self._folder = folder
        # `accumulate` around a step has counted it before the step begins
        self._counted: int = accelerator.step
        self._before = self._counted

    def begin_window(self, state: HostState) -> None:
        """Takes note of where accumulation stood before an update."""
        self._before = self._counted

    def end_step(self) -> None:
        """Takes note of where accumulation stands."""
        self._counted = self._accelerator.step

    def save(self, session: Session, report: StopReport) -> str:
        """Saves everything that the Accelerator has prepared, and the session's state."""
        refuse_to_save(session, num_ranks=self._accelerator.num_processes)
        folder = self._place(session)
        with replaced_when_whole(folder) as unfinished, self._named_by_hand():
            self._accelerator.save_state(str(unfinished / folder.name))
        return str(folder)

    def _place(self, session: Session) -> Path:
        if self._folder is not None:
            return self._folder
        journal = getattr(session.settings.journal, "path", None)
        beside = Path(journal).parent if isinstance(journal, str | Path) else Path()
        return Path(self._accelerator.project_dir or beside) / FOLDER_NAME

    @contextlib.contextmanager
    def _named_by_hand(self) -> Iterator[None]:
        """Leaves out of account the names and the limit of the Accelerator's own checkpoints."""
        accelerator, naming = self._accelerator, self._accelerator.project_configuration
        before = accelerator.step, naming.automatic_checkpoint_naming, naming.iteration
        accelerator.step, naming.automatic_checkpoint_naming = self._before, False
        try:
            yield
        finally:
            accelerator.step, naming.automatic_checkpoint_naming, naming.iteration = before
