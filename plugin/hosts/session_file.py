"""The state of a session beside the other files of a checkpoint folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rematic.activations import Notice
from rematic.session import Session
from rematic.session_state import ForeignStateError
from rematic.whole_files import write_whole

_log = logging.getLogger("rematic")
FILE_NAME = "rematic.json"
"""Name of the file in the folder."""


def write_session(session: Session, folder: Path) -> Path:
    """Writes policy, history and what was learned about memory.

    Returns:
        The file.
    """
    path = folder / FILE_NAME
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(session.state_dict(), indent=1).encode())
    return path


def read_session(session: Session, folder: Path) -> bool:
    """Takes up the state from a folder, if it is there.

    Returns:
        Whether it was there, and of this version and model.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        _log.info("%s holds no %s: the controller starts afresh.", folder, FILE_NAME)
        return False
    try:
        state = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): expected the file that was saved. Resume from another "
            "checkpoint, or remove the file to start without it."
        ) from error
    return take_up(session, state)


def take_up(session: Session, state: Mapping[str, Any]) -> bool:
    """Takes up a state from a checkpoint, unless it is foreign: then a notice says so.

    Returns:
        Whether it was taken up.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        session.load_state_dict(state)
    except ForeignStateError as error:
        text = f"the controller starts afresh, with the policy that was configured: {error}"
        _log.warning(text)
        session.write_notice(Notice(unit="", kind="resume", text=text))
        return False
    return True
