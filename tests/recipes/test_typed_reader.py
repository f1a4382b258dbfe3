from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from rematic.recipes.errors import RecipeError
from rematic.recipes.field_checks import whole_number
from rematic.recipes.tree import TreeMap
from rematic.recipes.typed_reader import read_tree
from rematic.recipes.yaml_text import parse_yaml


@dataclass(frozen=True, kw_only=True)
class Walk:
    name: Literal["walk"] = "walk"


@dataclass(frozen=True, kw_only=True)
class Ride:
    name: Literal["ride"] = "ride"
    wheels: int = 2

    def __post_init__(self) -> None:
        whole_number(self, "wheels", minimum=1, remedy="write 1 for a unicycle")


@dataclass(frozen=True, kw_only=True)
class Leg:
    to: str
    by: Walk | Ride


@dataclass(frozen=True, kw_only=True)
class Distance:
    metres: int


def parse_distance(written: str | int | float) -> Distance:
    if not isinstance(written, str) or not written.endswith("km"):
        raise ValueError(f"distance {written!r} is no distance; write it in km")
    return Distance(metres=1000 * int(written[:-2]))


@dataclass(frozen=True, kw_only=True)
class Trip:
    title: str = "trip"
    days: int = 1
    cost: float = 0.0
    planned: bool = False
    limit: int | None = None
    season: Literal["summer", "winter"] = "summer"
    tags: tuple[str, ...] = ()
    legs: tuple[Leg, ...] = ()
    length: Distance = field(default_factory=lambda: Distance(metres=1))
    first: Ride = field(default_factory=Ride)
    notes: Mapping[str, object] = field(default_factory=dict)


def _read(text: str) -> tuple[Trip, dict[str, str]]:
    tree = parse_yaml(text, source="t.yaml")
    assert isinstance(tree, TreeMap)
    trip, origins = read_tree(
        Trip, tree, noun="a trip", parsers={Distance: parse_distance}, other_keys=("extends",)
    )
    return trip, {path: str(origin) for path, origin in origins.items()}


@pytest.mark.parametrize(
    ("text", "trip"),
    [
        pytest.param("{title: no}", Trip(title="no"), id="text"),
        pytest.param("{days: 010}", Trip(days=10), id="whole number"),
        pytest.param("{cost: 3}", Trip(cost=3.0), id="number without a fraction"),
        pytest.param("{planned: true}", Trip(planned=True), id="truth value"),
        pytest.param("{limit: 3}", Trip(limit=3), id="optional"),
        pytest.param("{limit: null}", Trip(limit=None), id="null"),
        pytest.param("{season: winter}", Trip(season="winter"), id="choice"),
        pytest.param("{tags: [a, b]}", Trip(tags=("a", "b")), id="list"),
        pytest.param("{tags: []}", Trip(), id="empty list"),
        pytest.param("{length: 3km}", Trip(length=Distance(metres=3000)), id="parsed"),
        pytest.param("{first: {wheels: 3}}", Trip(first=Ride(wheels=3)), id="nested"),
        pytest.param("{first: {}}", Trip(), id="empty section"),
        pytest.param(
            "{legs: [{to: x, by: walk}]}", Trip(legs=(Leg(to="x", by=Walk()),)), id="name"
        ),
        pytest.param(
            "{legs: [{to: x, by: {name: ride, wheels: 4}}]}",
            Trip(legs=(Leg(to="x", by=Ride(wheels=4)),)),
            id="member",
        ),
        pytest.param(
            "{notes: {a: [1, {b: null, 0: x}], c.d: 1.5}}",
            Trip(notes={"a": [1, {"b": None, 0: "x"}], "c.d": 1.5}),
            id="free",
        ),
    ],
)
def test_values_are_read_by_their_annotations(text: str, trip: Trip) -> None:
    read, _ = _read(text)
    assert read == trip
    assert type(read.cost) is float


def test_every_value_has_an_origin() -> None:
    text = "legs:\n- {to: x, by: ride}\ntags: [a]\nnotes: {a: [1], b.c: {}}\nlength: 1km\n"
    _, origins = _read(text)
    assert origins == {
        "title": "default",
        "days": "default",
        "cost": "default",
        "planned": "default",
        "limit": "default",
        "season": "default",
        "tags[0]": "t.yaml:3:8",
        "legs[0].to": "t.yaml:2:8",
        "legs[0].by.name": "t.yaml:2:15",
        "legs[0].by.wheels": "default",
        "length": "t.yaml:5:9",
        "first.name": "default",
        "first.wheels": "default",
        "notes.a[0]": "t.yaml:4:13",
        "notes['b.c']": "t.yaml:4:22",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "{dais: 3}",
            "1:2: dais is an unknown key, did you mean days?; the keys of a trip are extends,"
            " title,"
            " days, cost, planned, limit, season, tags, legs, length, first, notes",
            id="unknown key",
        ),
        pytest.param(
            "{first: {colour: red}}",
            "1:10: first.colour is an unknown key; the keys of first are name, wheels",
            id="unknown key, none near",
        ),
        pytest.param(
            "{extend: x}",
            "1:2: extend is an unknown key, did you mean extends?; the keys of a trip are extends,"
            " title, days, cost, planned, limit, season, tags, legs, length, first, notes",
            id="near another key",
        ),
        pytest.param(
            "{first: {0: red}}",
            "1:10: first[0] is an unknown key; the keys of first are name, wheels",
            id="number as a key",
        ),
        pytest.param(
            "{planned: no}",
            "1:11: planned is 'no' (text); expected a truth value; write true or false",
            id="no is text",
        ),
        pytest.param(
            "{planned: 1}",
            "1:11: planned is 1 (a whole number); expected a truth value; write true or false",
            id="one is no truth value",
        ),
        pytest.param(
            "{days: 1.0}",
            "1:8: days is 1.0 (a number with a fraction); expected a whole number; write its digits"
            " alone, such as 1024",
            id="fraction",
        ),
        pytest.param(
            "{days: 1_000}",
            "1:8: days is '1_000' (text); expected a whole number; write its digits alone, such as"
            " 1024",
            id="underscore",
        ),
        pytest.param(
            "{days: true}",
            "1:8: days is true; expected a whole number; write its digits alone, such as 1024",
            id="truth value as a number",
        ),
        pytest.param(
            "{days: null}",
            "1:8: days is null; expected a whole number; write its digits alone, such as 1024",
            id="null",
        ),
        pytest.param(
            "{limit: x}",
            "1:9: limit is 'x' (text); expected a whole number; write its digits alone, such as"
            " 1024",
            id="optional",
        ),
        pytest.param(
            "{cost: free}",
            "1:8: cost is 'free' (text); expected a number; write for example 0.5",
            id="number",
        ),
        pytest.param(
            "{title: 7}",
            "1:9: title is 7 (a whole number); expected text; write it in quotes",
            id="text",
        ),
        pytest.param(
            "{title: [a]}",
            "1:9: title is a list of 1 items; expected text; write it in quotes",
            id="list",
        ),
        pytest.param(
            "{season: sumer}",
            "1:10: season is 'sumer' (text); expected one of summer, winter, did you mean summer?",
            id="choice",
        ),
        pytest.param(
            "{season: 1}",
            "1:10: season is 1 (a whole number); expected one of summer, winter",
            id="choice of another type",
        ),
        pytest.param(
            "{tags: a}",
            "1:8: tags is 'a' (text); expected a list; write [] around one value",
            id="not a list",
        ),
        pytest.param(
            "{tags: [a, 1]}",
            "1:12: tags[1] is 1 (a whole number); expected text; write it in quotes",
            id="item",
        ),
        pytest.param(
            "{legs: [{by: walk}]}", "1:9: legs[0].to is missing; write it", id="missing key"
        ),
        pytest.param(
            "{legs: [{to: x, by: drive}]}",
            "1:21: legs[0].by.name is 'drive' (text); expected one of walk, ride, did you mean"
            " ride?",
            id="member",
        ),
        pytest.param(
            "{legs: [{to: x, by: {wheels: 3}}]}",
            "1:21: legs[0].by is a mapping with the keys wheels; expected a name alone, or keys"
            " with a name, of: walk, ride",
            id="member without a name",
        ),
        pytest.param(
            "{legs: [{to: x, by: {name: walk, wheels: 3}}]}",
            "1:34: legs[0].by.wheels is an unknown key; the keys of legs[0].by are name",
            id="key of another member",
        ),
        pytest.param(
            "{legs: [{to: x, by: {name: ride, wheels: 0}}]}",
            "1:42: legs[0].by.wheels is 0; expected a whole number of at least 1; write 1 for a"
            " unicycle",
            id="refused by the class",
        ),
        pytest.param(
            "{length: 3}",
            "1:10: length: distance 3 is no distance; write it in km",
            id="refused by the parser",
        ),
        pytest.param(
            "{length: null}",
            "1:10: length is null; expected a single value; remove the key for the default",
            id="nothing to parse",
        ),
        pytest.param(
            "first:",
            "1:7: first is null; expected keys and values; remove the key, or write {}",
            id="empty section",
        ),
        pytest.param(
            "{notes: [1]}",
            "1:9: notes is a list of 1 items; expected keys and values; remove the key, or write"
            " {}",
            id="free mapping",
        ),
        pytest.param(
            "{notes: {0: x}}",
            "1:10: notes[0] is a number as a key; expected a name",
            id="number as a key of a free mapping",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        _read(text)
    assert str(caught.value) == f"t.yaml:{message}"


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(RecipeError) as caught:
        _read("dayz: 1\nplanned: no\nfirst: {wheels: 0}\ncost: x\n")
    places = [line.split(" ")[0] for line in str(caught.value).splitlines()]
    assert places == ["t.yaml:1:1:", "t.yaml:2:10:", "t.yaml:3:17:", "t.yaml:4:7:"]
