"""Which units a rule speaks of."""

from __future__ import annotations

import pytest

from rematic.policy import Recompute, Rule, match_names

UNITS = {f"layers.{i}": "Block" if i != 11 else "Last" for i in range(12)}


def positions(**options: object) -> list[int]:
    rule = Rule(pattern=str(options.pop("pattern", "layers.*")), action=Recompute(), **options)
    return [int(name.split(".")[1]) for name in rule.select(UNITS)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, list(range(12)), id="all"),
        pytest.param({"pattern": "Last"}, [11], id="class"),
        pytest.param({"pattern": "layers.[0-2]"}, [0, 1, 2], id="glob-range"),
        pytest.param({"first": 2}, [0, 1], id="first"),
        pytest.param({"last": 2}, [10, 11], id="last"),
        pytest.param({"first": 2, "last": 2}, [0, 1, 10, 11], id="both-ends"),
        pytest.param({"first": 9, "last": 9}, list(range(12)), id="both-ends-overlap"),
        pytest.param({"every": 2}, [0, 2, 4, 6, 8, 10], id="every-2"),
        pytest.param({"every": 5}, [0, 5, 10], id="every-5"),
        pytest.param({"share": (5, 6)}, [1, 2, 3, 4, 5, 7, 8, 9, 10, 11], id="5-of-6"),
        pytest.param({"share": (1, 3)}, [2, 5, 8, 11], id="1-of-3"),
        pytest.param({"share": (3, 3)}, list(range(12)), id="3-of-3"),
        pytest.param({"span": (4, 7)}, [4, 5, 6], id="span"),
        pytest.param({"span": (10, 99)}, [10, 11], id="span-past-the-end"),
        pytest.param({"exclude": ("layers.0", "Last")}, list(range(1, 11)), id="exclude"),
        pytest.param({"exclude": ("layers.0",), "every": 3}, [1, 4, 7, 10], id="exclude-first"),
    ],
)
def test_a_rule_selects_exactly(options: dict[str, object], expected: list[int]) -> None:
    assert positions(**options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"first": 0}, "first 0: expected a whole number above 0", id="first-0"),
        pytest.param({"share": (7, 6)}, r"share \(7, 6\): expected two whole", id="share"),
        pytest.param({"share": (0, 6)}, r"share \(0, 6\): expected two whole", id="share-0"),
        pytest.param({"span": (3, 3)}, r"span \(3, 3\): expected two whole", id="span-empty"),
        pytest.param({"every": 2, "first": 1}, "more than one position", id="two-positions"),
    ],
)
def test_positions_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(pattern="layers.*", action=Recompute(), **options)


def test_a_pattern_that_matches_nothing_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"'layer\.\*' matches none of the 12.*Near: layers\."):
        positions(pattern="layer.*")


def test_an_exclusion_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.0' matches none"):
        positions(exclude=("blocks.0",))


def test_a_rule_that_selects_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="selects none of the 12 units"):
        positions(span=(20, 30))


@pytest.mark.parametrize(
    ("prefix", "pattern", "matched"),
    [
        ("base_model.model.", "model.layers.*", 2),
        ("model.base_model.model.", "model.layers.*", 2),
        ("model.", "model.layers.1", 1),
        ("model.", "layers.?", 2),
        ("model.", "odel.layers.*", 0),
        ("model.", "model.model.layers.*", 2),
    ],
)
def test_what_holds_the_whole_model_may_be_left_out(
    prefix: str, pattern: str, matched: int
) -> None:
    classes = {f"{prefix}model.layers.{at}": "Layer" for at in range(2)}
    if not matched:
        with pytest.raises(ValueError, match="matches none of the 2"):
            match_names(pattern, classes)
        return
    assert len(match_names(pattern, classes)) == matched


def test_a_part_of_the_model_may_not_be_left_out() -> None:
    classes = {"encoder.block.0": "Block", "decoder.block.0": "Block"}
    with pytest.raises(ValueError, match=r"'block\.0' matches none"):
        match_names("block.0", classes)


def test_a_whole_name_comes_first() -> None:
    names = ("model", "model.layers", "model.model", "model.model.layers")
    assert match_names("model.layers", dict.fromkeys(names, "M")) == ["model.layers"]
