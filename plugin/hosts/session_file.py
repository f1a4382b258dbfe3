"""The state of a session beside the other files of a checkpoint folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rematic.session import Session

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
    path.write_text(json.dumps(session.state_dict(), indent=1), "utf-8")
    return path


def read_session(session: Session, folder: Path) -> bool:
    """Takes up the state from a folder, if it is there.

    Returns:
        Whether it was there.

    Raises:
        ValueError: If the file is damaged or of another model.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        _log.info("%s holds no %s: the controller starts afresh.", folder, FILE_NAME)
        return False
    try:
        state = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is damaged ({error}): expected the file that was saved. Resume from another "
            "checkpoint, or remove the file to start without it."
        ) from error
    session.load_state_dict(state)
    return True
