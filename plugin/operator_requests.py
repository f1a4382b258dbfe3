"""Requests of an operator to a running job, by lines in a file of its run directory.

One JSON object per line: `schema`, `id`, `time` (seconds since the epoch), `request` and what it
needs. The command line appends, the session reads at boundaries and answers in the journal under
the same `id`. A request that is malformed, stale, replayed or impossible is answered too, and
changes nothing.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematic.appended_lines import AppendedLines
from rematic.control import policy_in_history
from rematic.policy import policy_named

if TYPE_CHECKING:
    from rematic.session import Session

FILE_NAME = "control.jsonl"
"""Name of the file inside a run directory."""

SCHEMA_VERSION = 1
"""Version of the meaning of the fields."""

STALE_SECONDS = 600.0
"""A request that is older is refused: whoever asked has long looked elsewhere."""

POLL_SECONDS = 1.0
"""The file is looked at no more often than this."""

KINDS = ("rollback", "pin", "unpin")
"""What can be asked for."""

REQUESTS_MAX = 20
"""Answers at one boundary: each of them waits for the disk."""

_LINES_MAX = 1000
_MAX_LINE_BYTES = 1 << 16
_LOOK_BYTES = 2 * _MAX_LINE_BYTES
_KNOWN_BYTES = 1 << 20
"""So much of what earlier processes were asked is known; what is older is stale in any case."""
_MAX_ID_LETTERS = 100
_MAX_TIME_SECONDS = 1 << 40


class RequestError(ValueError):
    """A request that cannot be granted."""


def append_request(run: Path, kind: str, **fields: object) -> str:
    """Appends a request to a run's file and returns its id.

    Args:
        run: The run directory.
        kind: One of `KINDS`.
        fields: What it needs: `policy`, `steps`, `reason`.
    """
    request_id = uuid.uuid4().hex
    header = {"schema": SCHEMA_VERSION, "id": request_id, "time": round(time.time(), 3)}
    line = json.dumps({**header, "request": kind, **fields}, separators=(",", ":")) + "\n"
    with open(run / FILE_NAME, "ab", buffering=0) as file:  # one write, so that lines stay whole
        file.write(line.encode())
    return request_id


@dataclass(frozen=True, kw_only=True)
class Request:
    """One line, understood or not."""

    fields: Mapping[str, Any]
    """What it says, as far as it is an object."""

    refused: str | None
    """Why it is refused whatever the session would say."""

    def answered_by(self, session: Session) -> dict[str, object]:
        """Does what is asked for, if it can be, and returns the answer for the journal."""
        refused = self.refused
        if refused is None:
            try:
                _grant(self.fields, session)
            except ValueError as error:
                refused = str(error)
        named = {name: _short(self.fields.get(name)) for name in ("id", "request", "policy")}
        status = "accepted" if refused is None else "refused"
        return {**named, "status": status, "reason": refused or _reason(self.fields)}


def _grant(fields: Mapping[str, Any], session: Session) -> None:
    reason, kind = _reason(fields), fields["request"]
    if kind == "rollback":
        session.rollback(steps=fields.get("steps", 1), reason=reason)
    elif kind == "pin":
        known = policy_in_history(session.history, fields["policy"])
        session.pin(known or policy_named(fields["policy"]), reason=reason)
    else:
        session.unpin(reason=reason)


def _reason(fields: Mapping[str, Any]) -> str:
    given = fields.get("reason")
    return f"by an operator: {given}" if given else "by an operator"


def _short(value: object) -> str | None:
    return value[:_MAX_ID_LETTERS] if isinstance(value, str) else None


class RequestReader:
    """Reads what was appended since the last look.

    What is in the file when it is made belongs to an earlier process: it is not answered, and its
    ids are known from then on.

    Args:
        path: The file, which need not exist.
        clock: Returns seconds since the epoch.
        ticks: Returns seconds that never go back.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ticks = ticks
        self._next_look = float("-inf")
        self._ids: set[str] = set()
        self._file = AppendedLines(path, most_bytes=_LOOK_BYTES)
        self._lines: deque[bytes] = deque()
        for line in self._file.read_to_end(last_bytes=_KNOWN_BYTES):
            self._known_before(_parsed(line)[0])

    def poll(self) -> list[Request]:
        """Returns the requests that have come; looks at the file once per `POLL_SECONDS`.

        At most `REQUESTS_MAX` at once, and lines that nobody can await an answer to as one.
        """
        now = self._ticks()
        if now < self._next_look:
            return []
        self._next_look = now + POLL_SECONDS
        self._lines = self._lines or deque(self._file.read())
        found: list[Request] = []
        nameless: list[Request] = []
        for _ in range(min(len(self._lines), _LINES_MAX)):
            line = self._lines.popleft()
            if line.strip():
                request = self._checked(line)
                (found if "id" in request.fields else nameless).append(request)
            if len(found) == REQUESTS_MAX:
                break
        return [*found, *_as_one(nameless)]

    def _checked(self, line: bytes) -> Request:
        fields, refused = _parsed(line)
        if refused is None:
            refused = self._objection(fields)
        if self._known_before(fields) and refused is None:
            refused = f"the id {fields['id']!r} was answered already: a request counts once"
        return Request(fields=fields, refused=refused)

    def _known_before(self, fields: Mapping[str, Any]) -> bool:
        request_id = fields.get("id")
        if not isinstance(request_id, str):
            return False
        is_known = request_id in self._ids
        self._ids.add(request_id)
        return is_known

    def _objection(self, fields: Mapping[str, Any]) -> str | None:
        age = self._clock() - fields["time"]
        if abs(age) > STALE_SECONDS:
            return f"it is stale: made {age:.0f} seconds ago, expected at most {STALE_SECONDS:.0f}"
        return None


def _as_one(nameless: list[Request]) -> list[Request]:
    """Returns requests without an id as one, so that a file of something else costs little."""
    if len(nameless) < 2:
        return nameless
    more = f"{nameless[0].refused}; {len(nameless) - 1} more lines have no id that is a text"
    return [Request(fields={}, refused=more)]


def _parsed(line: bytes) -> tuple[dict[str, Any], str | None]:
    """Returns the fields of a line, and what is wrong with them."""
    if len(line) > _MAX_LINE_BYTES:
        return {}, f"a line of {len(line)} bytes: expected at most {_MAX_LINE_BYTES}"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"it is not JSON ({error})"
    if not isinstance(fields, dict):
        return {}, f"it is a {type(fields).__name__}: expected an object"
    fault = _fault(fields)
    if not isinstance(fields.get("id"), str):
        fields.pop("id", None)
    return fields, fault


def _fault(fields: Mapping[str, Any]) -> str | None:
    wanted: dict[str, tuple[type, ...]] = {"id": (str,), "time": (int, float), "request": (str,)}
    if fields.get("schema") != SCHEMA_VERSION:
        return f"its schema is {fields.get('schema')!r}: expected {SCHEMA_VERSION}"
    if fields.get("request") == "pin":
        wanted["policy"] = (str,)
    if "steps" in fields:
        wanted["steps"] = (int,)
    if "reason" in fields:
        wanted["reason"] = (str,)
    for name, kinds in wanted.items():
        value = fields.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return f"its {name} is {value!r}: expected {' or '.join(k.__name__ for k in kinds)}"
    if len(fields["id"]) > _MAX_ID_LETTERS:
        return f"its id has {len(fields['id'])} letters: expected at most {_MAX_ID_LETTERS}"
    if not abs(fields["time"]) < _MAX_TIME_SECONDS:  # nor is NaN, which JSON of Python may hold
        return f"its time is {fields['time']!r}: expected seconds since the epoch"
    if fields["request"] not in KINDS:
        return f"its request is {fields['request']!r}: expected one of {', '.join(KINDS)}"
    return None
