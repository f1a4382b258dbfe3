"""Actions by name."""

from __future__ import annotations

import re

import pytest

from rematic.policy import ACTIONS, Keep, Recompute, Tile, action_named


def test_every_action_is_found_by_its_name() -> None:
    assert action_named("keep") == Keep()
    assert action_named("recompute") == Recompute()
    assert {name: action_named(name).name for name in ACTIONS} == {name: name for name in ACTIONS}


def test_an_unknown_action_lists_those_there_are() -> None:
    names = "keep, selective, recompute, recompute+offload, offload, compress, tile"
    message = f"unknown action 'drop': expected one of {names}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        action_named("drop")


@pytest.mark.parametrize(
    ("tile", "length", "slices"),
    [
        (Tile(), 2048, 1),
        (Tile(), 2049, 2),
        (Tile(tile_tokens=3), 7, 3),
        (Tile(num_tiles=5), 7, 5),
    ],
    ids=str,
)
def test_slices_by_size_or_by_number(tile: Tile, length: int, slices: int) -> None:
    assert tile.slices_of(length) == slices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tile_tokens": 3, "num_tiles": 2},
            "tile has tile_tokens 3 and num_tiles 2: expected one",
        ),
        ({"num_tiles": 0}, "tile has num_tiles 0: expected a whole number above 0."),
        ({"tile_tokens": -1}, "tile has tile_tokens -1: expected a whole number above 0."),
    ],
)
def test_slices_without_sense_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        action_named("tile", **options)
