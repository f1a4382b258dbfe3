"""What was read from outside is as annotated, or the first fault is named with its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pytest

from rematic.typed_values import untyped


class Pair(NamedTuple):
    number: int
    share: float | None = None


@dataclass(frozen=True)
class Whole:
    name: str
    pairs: tuple[Pair, ...] = ()
    by_key: Mapping[tuple[str, int], Pair] | None = None
    kind: Literal["one", "two"] = "one"
    pair: Pair | None = None


GOOD = Whole(
    name="a",
    pairs=(Pair(1), Pair(2, 3)),
    by_key={("x", 1): Pair(1, 0.5)},
    kind="two",
    pair=Pair(4),
)

FAULTS: dict[str, tuple[object, Any, str]] = {
    "a number": ("x", int, "it is 'x': expected int"),
    "no whole number": (0.5, int, "it is 0.5: expected int"),
    "a truth value": (True, float, "it is True: expected float"),
    "a field": (Whole(name=3), Whole, "it.name is 3: expected str"),  # type: ignore[arg-type]
    "an item": (
        Whole(name="a", pairs=(Pair(1), Pair("x"))),  # type: ignore[arg-type]
        Whole,
        "it.pairs[1].number is 'x': expected int",
    ),
    "another tuple": (
        Whole(name="a", pairs=((1, 2),)),  # type: ignore[arg-type]
        Whole,
        "it.pairs[0] is (1, 2): expected Pair",
    ),
    "a list": (
        Whole(name="a", pairs=[]),  # type: ignore[arg-type]
        Whole,
        "it.pairs is []: expected tuple",
    ),
    "a word": (
        Whole(name="a", kind="three"),  # type: ignore[arg-type]
        Whole,
        "it.kind is 'three': expected typing.Literal['one', 'two']",
    ),
    "inside of a union": (
        Whole(name="a", pair=Pair(1, "x")),  # type: ignore[arg-type]
        Whole,
        "it.pair.share is 'x': expected float",
    ),
    "none of several": (0.5, int | str | None, "it is 0.5: expected int | str | None"),
    "a key": (
        Whole(name="a", by_key={("x", "y"): Pair(1)}),  # type: ignore[dict-item]
        Whole,
        "a key of it.by_key[1] is 'y': expected int",
    ),
    "too few": (("a",), tuple[str, int], "it has 1 items: expected 2"),
    "nothing": (None, int, "it is None: expected int"),
}


@pytest.mark.parametrize(("value", "kind", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_what_is_of_another_type_is_named(value: object, kind: Any, message: str) -> None:
    assert str(untyped(value, kind)).startswith(message)


def test_what_is_as_annotated_has_no_fault() -> None:
    assert untyped(GOOD, Whole) is None
    assert untyped(7, float) is None
    assert untyped([1, "x"], list) is None
    assert untyped("anything", Any) is None
