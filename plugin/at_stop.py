"""Lets somebody save the training before it stops, whose errors must not hide why it stops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from rematic.control import StopReport
from rematic.transaction import release_attempt

_log = logging.getLogger("rematic")


def save_before_stop(
    save: Callable[[StopReport], str | None] | None, report: StopReport
) -> StopReport:
    """Returns the report with where the training was saved, or why it could not be.

    An interrupt (Ctrl-C) passes: whoever sends one does not want to wait for a checkpoint.

    Args:
        save: Saves and returns where, None for nowhere; None if there is nobody to save.
        report: Why the training stops.
    """
    if save is None:
        return report
    try:
        return replace(report, checkpoint=save(report))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        release_attempt(error)
    _log.warning("the training could not be saved before it stops: %s", reason)
    return replace(report, not_saved=reason)
