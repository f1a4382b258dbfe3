"""Between a session and what is saved of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rematic.activations import Notice
from rematic.session_revision import revise
from rematic.session_state import SavedSession

if TYPE_CHECKING:
    from rematic.session import Session

_log = logging.getLogger("rematic")


def saved_session(session: Session) -> SavedSession:
    """Returns what is to be saved of a session, whose inner parts this file may use."""
    planner = session._model_planner
    return SavedSession(
        units=tuple(session._engine.classes),
        num_steps=session.num_steps,
        history=session._policies.history,
        costs=session._costs,
        controller=session.supervisor.state,
        kinds={} if planner is None else planner.kinds,
        configured=session._configured,
    )


def resume(session: Session, saved: SavedSession) -> None:
    """Lets a session go on from what was saved.

    A policy other than the one that the saved session was attached with follows the saved one.
    """
    revision = revise(saved, session._configured, allow_lossy=session.settings.allow_lossy)
    first = session.policy if revision.takes_policy else None
    session._policies.go_on(  # first: a rule may match nothing
        saved.history, policy=first, step=saved.num_steps, reason=revision.text
    )
    session.supervisor.take_up(revision.controller, begins=revision.takes_policy)
    if session._model_planner is not None:
        session._model_planner.take_up(saved.kinds)
    session._costs, session.num_steps = saved.costs, saved.num_steps
    session.has_updated = False
    session._configured = revision.configured
    if revision.text:
        _log.warning(revision.text)
        session.write_notice(Notice(unit="", kind="resume", text=revision.text))
