from __future__ import annotations

import math

import pytest

from rematic.recipes.errors import RecipeError
from rematic.recipes.tree import Origin, TreeMap, plain
from rematic.recipes.yaml_text import MAX_DEPTH, parse_yaml, parse_yaml_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("y", "y"),
        ("true", True),
        ("FALSE", False),
        ("tRue", "tRue"),
        ("010", 10),
        ("-010", -10),
        ("+3", 3),
        ("0o17", 15),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-01-31", "2026-01-31"),
        ("3e-4", 3e-4),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("inf", "inf"),
        ("~", None),
        ("", None),
        ("null", None),
        ("nULL", "nULL"),
        ("=", "="),
        ("'010'", "010"),
        ('"true"', "true"),
        ("90%", "90%"),
        ("{a: [1, x]}", {"a": [1, "x"]}),
        ("{0: zero}", {0: "zero"}),
        ("{no: 1}", {"no": 1}),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = plain(parse_yaml_value(text, origin=Origin(source="here")))
    assert read == value
    assert type(read) is type(value)


def test_not_a_number() -> None:
    read = plain(parse_yaml_value(".nan", origin=Origin(source="here")))
    assert isinstance(read, float)
    assert math.isnan(read)


def test_every_key_and_value_knows_its_place() -> None:
    tree = parse_yaml("a: 1\nb:\n  - x\n  - {c: é, d: 2}\n", source="r.yaml")
    assert isinstance(tree, TreeMap)
    entry = tree.entries["b"]
    assert str(entry.key_origin) == "r.yaml:2:1"
    items = entry.value
    assert str(items.origin) == "r.yaml:3:3"
    last = items.items[1]  # type: ignore[union-attr]
    assert isinstance(last, TreeMap)
    assert str(last.entries["d"].key_origin) == "r.yaml:4:12"
    assert str(last.entries["d"].value.origin) == "r.yaml:4:15"


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "---\n"], ids=["nothing", "comment", "start"]
)
def test_a_text_without_a_value(text: str) -> None:
    tree = parse_yaml(text, source="r.yaml")
    assert tree is None or plain(tree) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "a: &x 1\nb: *x",
            "r.yaml:1:4: &x: anchors and aliases are not supported; write the value out, or move"
            " what is shared to a recipe and name it by extends (text that begins with & needs"
            " quotes)",
            id="anchor",
        ),
        pytest.param(
            "a: [*x]", "r.yaml:1:5: *x: anchors and aliases are not supported", id="alias"
        ),
        pytest.param(
            "a: *.layers.*",
            "r.yaml:1:5: not valid YAML: expected alphabetic or numeric character, but found '.'"
            " (while scanning an alias); text that begins with * needs quotes, such as"
            " '*.layers.*'",
            id="glob",
        ),
        pytest.param(
            "a: {<<: {b: 1}}", "r.yaml:1:5: merge keys (<<) are not supported", id="merge key"
        ),
        pytest.param(
            "a: 1\nb: !!python/object/apply:os.system [ls]",
            "r.yaml:2:4: !!python/object/apply:os.system: tags are not supported; remove the tag",
            id="python tag",
        ),
        pytest.param("a: !!str 1", "r.yaml:1:4: !!str: tags are not supported", id="plain tag"),
        pytest.param("a: ! 1", "r.yaml:1:4: !: tags are not supported", id="bare tag"),
        pytest.param(
            "a: 1\nb: 2\na: 3",
            "r.yaml:3:1: the key 'a' is written twice (first at r.yaml:1:1); keep one of the two",
            id="duplicate key",
        ),
        pytest.param(
            "{1: a, 01: b}",
            "r.yaml:1:8: the key 1 is written twice (first at r.yaml:1:2)",
            id="duplicate number",
        ),
        pytest.param(
            "a: b ${oc.env:HOME}",
            "r.yaml:1:4: 'b ${oc.env:HOME}' holds ${, but recipes have no interpolation; write the"
            " value out, or give it as an override key=value",
            id="interpolation",
        ),
        pytest.param("'${a}': 1", "r.yaml:1:1: '${a}' holds ${", id="interpolated key"),
        pytest.param(
            "[a]: 1",
            "r.yaml:1:1: a list or a mapping stands as a key; expected a name",
            id="list key",
        ),
        pytest.param(
            "true: 1",
            "r.yaml:1:1: the key true is not a name; write it in quotes if it is meant as text",
            id="truth value as key",
        ),
        pytest.param("? \n: 1", "r.yaml:1:2: the key null is not a name", id="no key"),
        pytest.param(
            "a: " + "[" * MAX_DEPTH,
            "r.yaml:1:23: nested more than 20 levels deep; no recipe needs that, check the brackets"
            " and the indentation",
            id="too deep",
        ),
        pytest.param(
            "a: 1\n b: 2",
            "r.yaml:2:3: not valid YAML: mapping values are not allowed here",
            id="indentation",
        ),
        pytest.param("a: [1", "r.yaml:1:6: not valid YAML: expected ',' or ']'", id="open list"),
        pytest.param("a: 1\n--- \nb: 2", "r.yaml:2:1: not valid YAML: ", id="two documents"),
        pytest.param(
            "a: b\x07",
            "r.yaml: YAML cannot hold one of the characters (unacceptable character #x0007: special"
            " characters are not allowed); remove it",
            id="control character",
        ),
        pytest.param(
            "a: " + "9" * 5000,
            "r.yaml:1:4: a whole number of 5000 digits is too long; write fewer digits",
            id="long number",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, source="r.yaml")
    assert str(caught.value).startswith(message)


def test_the_deepest_nesting_that_is_read() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_yaml(text, source="r.yaml") is not None


def test_a_value_outside_a_file_has_one_origin() -> None:
    origin = Origin(source="override 1: a=[1]")
    tree = parse_yaml_value("[1]", origin=origin)
    assert tree.origin is origin
    with pytest.raises(RecipeError, match=r"^override 1: a=\[1\]: not valid YAML"):
        parse_yaml_value("[1", origin=origin)
