"""Names the event of a journal that cannot be read, and knows where others are missing."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any


class DamagedEventError(ValueError):
    """An event that lacks what decisions are made from, or holds something else in its place."""


class DamageNamed:
    """While it is entered, what a damaged event brings about becomes an error that names it.

    Args:
        event: The event that is read meanwhile.
    """

    def __init__(self, event: Mapping[str, Any]) -> None:
        self._event = event

    def __enter__(self) -> None:
        """Begins to watch."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raises `DamagedEventError` in place of what a damaged event brings about."""
        if isinstance(error, _BROUGHT_ABOUT):
            raise DamagedEventError(
                f"the `{self._event['event']}` event of step {self._event.get('step')} is damaged "
                f"({type(error).__name__}: {error}): expected what rematic writes, of the version "
                "that reads it. Restore the journal, or read the rest by `rematic report`."
            ) from error


_BROUGHT_ABOUT = (KeyError, TypeError, AttributeError, ValueError, OverflowError)


def ends_what_is_known(event: Mapping[str, Any]) -> bool:
    """Returns whether nothing follows from the events before until the next `control`.

    Another process begins, or its journal says that it lacks some.
    """
    return event["event"] == "attach" or (
        event["event"] == "notice" and event.get("kind") == "journal"
    )
