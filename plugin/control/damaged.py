"""Names the event of a journal that cannot be read, and knows where others are missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


class DamagedEventError(ValueError):
    """An event that lacks what decisions are made from, or holds something else in its place."""


@contextlib.contextmanager
def damage_named(event: Mapping[str, Any]) -> Iterator[None]:
    """Turns what a damaged event brings about into an error that names it.

    Raises:
        DamagedEventError: It is damaged.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DamagedEventError(
            f"the `{event['event']}` event of step {event.get('step')} is damaged "
            f"({type(error).__name__}: {error}): expected what rematic writes, of the version that "
            "reads it. Restore the journal, or read the rest by `rematic report`."
        ) from error


def ends_what_is_known(event: Mapping[str, Any]) -> bool:
    """Returns whether nothing follows from the events before until the next `control`.

    Another process begins, or its journal says that it lacks some.
    """
    return event["event"] == "attach" or (
        event["event"] == "notice" and event.get("kind") == "journal"
    )
