"""What the attempts after a failed one do, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from rematic.control import FirstAttempt, escalate
from rematic.policy import Action, Keep, Offload, Recompute, RecomputeOffload

ARMED_KEEP = ["recompute", "recompute+offload", "offload"]
AGAIN = "the same plan, failed ops run again"


def names(action: Action = Keep(), **changes: Any) -> list[str]:  # noqa: B008 - frozen
    defaults: dict[str, Any] = {
        "actions": (action, action),
        "armed": True,
        "can_arm": True,
        "attempts": 9,
        "may_tile": False,
        "may_compress": False,
        "max_parts": 1,
    }
    return [rung.name for rung in escalate(FirstAttempt(**{**defaults, **changes}))]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ARMED_KEEP),
        ({"armed": False}, [AGAIN, *ARMED_KEEP]),
        ({"armed": False, "can_arm": False}, ARMED_KEEP),
        ({"action": Recompute()}, ["recompute+offload", "offload"]),
        ({"action": RecomputeOffload()}, ["offload"]),
        ({"action": Offload()}, ["the same plan"]),
        ({"actions": (Keep(), Recompute())}, ARMED_KEEP),
        ({"attempts": 1}, []),
        ({"attempts": 2}, ["offload"]),
        ({"attempts": 3, "armed": False}, ["recompute+offload", "offload"]),
        ({"may_compress": True}, [*ARMED_KEEP, "compress"]),
        ({"may_compress": True, "attempts": 3}, ["offload", "compress"]),
        ({"may_compress": True, "attempts": 2}, ["offload"]),
        ({"may_tile": True}, [*ARMED_KEEP, "tile"]),
        ({"may_tile": True, "attempts": 2}, ["offload"]),
        ({"may_tile": True, "may_compress": True, "attempts": 4}, ["offload", "tile", "compress"]),
        (
            {"max_parts": 5, "attempts": 5},
            [*ARMED_KEEP[1:], "2 parts, recompute+offload", "4 parts, recompute+offload"],
        ),
        ({"max_parts": 8, "attempts": 3}, ["offload", "8 parts, recompute+offload"]),
    ],
)
def test_lossless_attempts_come_first_and_the_lightest_are_left_out(
    changes: dict[str, Any], expected: list[str]
) -> None:
    assert names(**changes) == expected


def test_tiling_compressing_and_splitting_are_lossy() -> None:
    rungs = escalate(
        FirstAttempt(
            actions=(Keep(),),
            armed=False,
            can_arm=True,
            attempts=9,
            may_tile=True,
            may_compress=True,
            max_parts=2,
        )
    )
    assert [rung.is_lossy for rung in rungs] == [False] * 4 + [True] * 3
