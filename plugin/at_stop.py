"""Lets somebody save the training before it stops, whose errors must not hide why it stops."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rematic.control import StopReport
from rematic.session_events import report_event
from rematic.stop_snapshot import save_memory_snapshot
from rematic.transaction import release_attempt

if TYPE_CHECKING:
    from rematic.session import Session

_log = logging.getLogger("rematic")

UNFINISHED = (
    "the optimizer has stepped, and what comes behind its step was not finished: resume from the "
    "last checkpoint"
)
"""Why a training that stops behind an update is not saved."""


class NotSavedError(RuntimeError):
    """Why a training is not saved before it stops; `at_stop` raises it."""


def save_before_stop(session: Session, report: StopReport) -> StopReport:
    """Returns the report with where the training was saved, or why it could not be.

    While `session.at_stop` runs, buffers, generators and `num_steps` are as they were behind the
    last optimizer step, since the micro-batches after it come again when the training is resumed.
    An interrupt (Ctrl-C) passes: whoever sends one does not want to wait for a checkpoint.

    Args:
        session: The session, without an open step.
        report: Why the training stops.
    """
    if session.at_stop is None:
        return replace(report, not_saved="`session.at_stop` is not set")
    window, num_steps = session.window, session.num_steps
    is_whole = not session.is_behind_update  # no optimizer has stepped inside the step
    if is_whole:
        report = replace(report, num_unsaved_steps=num_steps - window.num_steps)
    try:
        with window.put_back() if is_whole else contextlib.nullcontext():
            session.num_steps = window.num_steps if is_whole else num_steps
            return replace(report, checkpoint=session.at_stop(report))
    except NotSavedError as error:
        return replace(report, not_saved=str(error))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        release_attempt(error)
    finally:
        session.num_steps = num_steps
    _log.warning("the training could not be saved before it stops: %s", reason)
    return replace(report, not_saved=reason)


def end_training(session: Session, report: StopReport, *, step: int) -> StopReport:
    """Saves the training and what the device holds, and writes why it ends.

    Args:
        session: The session, without an open step.
        report: Why it ends; where it says already why nothing is saved, nothing is.
        step: Number of the micro-batch.

    Returns:
        The report with what was saved.
    """
    journal = session.settings.journal
    try:
        if report.not_saved is None:
            report = save_before_stop(session, report)
        report = replace(report, memory_snapshot=save_memory_snapshot(report, journal))
    finally:  # an interrupt while it is saved as well
        journal.write(report_event(report, step=step))
    return report


def refuse_to_save(session: Session, *, num_ranks: int) -> None:
    """Refuses what a host should not save.

    Raises:
        NotSavedError: If several ranks train, or nothing was trained.
    """
    if num_ranks > 1:
        raise NotSavedError(
            f"saving takes all {num_ranks} ranks, and the others have not stopped: resume from "
            "the last checkpoint"
        )
    if not session.has_updated:
        raise NotSavedError("nothing was trained since the training began")
