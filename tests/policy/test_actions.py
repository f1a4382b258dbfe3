"""Actions by name."""

from __future__ import annotations

import re

import pytest

from rematic.policy import ACTIONS, Keep, Recompute, action_named


def test_every_action_is_found_by_its_name() -> None:
    assert action_named("keep") == Keep()
    assert action_named("recompute") == Recompute()
    assert {name: action_named(name).name for name in ACTIONS} == {name: name for name in ACTIONS}


def test_an_unknown_action_lists_those_there_are() -> None:
    names = "keep, selective, recompute, recompute+offload, offload, compress"
    message = f"unknown action 'drop': expected one of {names}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        action_named("drop")
