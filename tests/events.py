"""A journal for tests, which keeps what it is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class Events:
    """A journal that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        json.dumps(event)  # plain types only
        self.events.append(dict(event))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]
