from __future__ import annotations

import pytest

from rematic.recipes.errors import RecipeError
from rematic.recipes.layers import apply_override, merge
from rematic.recipes.tree import Origin, Tree, TreeMap, plain
from rematic.recipes.yaml_text import parse_yaml


def _tree(text: str, *, source: str = "r.yaml") -> TreeMap:
    tree = parse_yaml(text, source=source)
    assert isinstance(tree, TreeMap)
    return tree


def _at(tree: Tree, *keys: str) -> Tree:
    for key in keys:
        assert isinstance(tree, TreeMap)
        tree = tree.entries[key].value
    return tree


@pytest.mark.parametrize(
    ("base", "top", "merged"),
    [
        pytest.param("{a: 1, b: 2}", "{b: 3, c: 4}", {"a": 1, "b": 3, "c": 4}, id="keys"),
        pytest.param("a: {b: 1, c: 2}", "a: {c: 3}", {"a": {"b": 1, "c": 3}}, id="nested"),
        pytest.param("a: [1, 2]", "a: [3]", {"a": [3]}, id="lists are replaced"),
        pytest.param("a: {b: 1}", "a: 2", {"a": 2}, id="a mapping by a value"),
        pytest.param("a: 2", "a: {b: 1}", {"a": {"b": 1}}, id="a value by a mapping"),
        pytest.param("a: 1", "a: null", {"a": None}, id="a value by null"),
        pytest.param("a: {b: 1}", "a: {}", {"a": {"b": 1}}, id="an empty mapping adds nothing"),
    ],
)
def test_the_top_is_laid_over_the_base(base: str, top: str, merged: object) -> None:
    assert plain(merge(_tree(base), _tree(top))) == merged


def test_values_keep_their_place_when_merged() -> None:
    tree = merge(_tree("a: {b: 1, c: 2}", source="base"), _tree("a:\n  c: 3", source="top"))
    assert str(_at(tree, "a", "b").origin) == "base:1:8"
    assert str(_at(tree, "a", "c").origin) == "top:2:6"


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        pytest.param("a.b=2", {"a": {"b": 2}, "l": [{"m": 1}]}, id="value"),
        pytest.param(" a.b = 2 ", {"a": {"b": 2}, "l": [{"m": 1}]}, id="spaces"),
        pytest.param("a.b=", {"a": {"b": None}, "l": [{"m": 1}]}, id="no text is null"),
        pytest.param("a.b=x=y", {"a": {"b": "x=y"}, "l": [{"m": 1}]}, id="the first = counts"),
        pytest.param("a.b=no", {"a": {"b": "no"}, "l": [{"m": 1}]}, id="yaml 1.2"),
        pytest.param("a.b=*.h.*", {"a": {"b": "*.h.*"}, "l": [{"m": 1}]}, id="glob"),
        pytest.param("a={c: 1}", {"a": {"c": 1}, "l": [{"m": 1}]}, id="a mapping is replaced"),
        pytest.param("l[0].m=5", {"a": {"b": 1}, "l": [{"m": 5}]}, id="in a list"),
        pytest.param("l[1].m=5", {"a": {"b": 1}, "l": [{"m": 1}, {"m": 5}]}, id="append"),
        pytest.param("x.y.z=1", {"a": {"b": 1}, "l": [{"m": 1}], "x": {"y": {"z": 1}}}, id="new"),
        pytest.param("x[0].y=1", {"a": {"b": 1}, "l": [{"m": 1}], "x": [{"y": 1}]}, id="new list"),
        pytest.param("a['b.c']=1", {"a": {"b": 1, "b.c": 1}, "l": [{"m": 1}]}, id="dotted key"),
    ],
)
def test_an_override_sets_one_value(text: str, changed: object) -> None:
    tree = _tree("{a: {b: 1}, l: [{m: 1}]}")
    before = plain(tree)
    assert plain(apply_override(tree, text=text, number=1)) == changed
    assert plain(tree) == before


def test_an_overridden_value_names_the_override() -> None:
    tree = apply_override(_tree("a: {b: 1, c: 1}"), text="a.b=2", number=3)
    assert _at(tree, "a", "b").origin == Origin(source="override 3: a.b=2")
    assert str(_at(tree, "a", "c").origin) == "r.yaml:1:14"


def test_a_number_addresses_a_number_as_key() -> None:
    tree = _tree("labels: {0: a, 1: b}")
    changed = apply_override(tree, text="labels[1]=c", number=1)
    assert plain(changed) == {"labels": {0: "a", 1: "c"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a", "no = found; expected key=value, such as training.epochs=2", id="no ="),
        pytest.param(
            "=1", "'' is not a path to a value; expected names joined by dots", id="no key"
        ),
        pytest.param("+a=1", "'+a' is not a path to a value", id="sign"),
        pytest.param(
            "extends=b",
            "extends cannot be overridden; write a recipe that extends the other one",
            id="extends",
        ),
        pytest.param(
            "a.b.c=1",
            "a.b is the single value 1 (r.yaml:1:9), it has no c; set a.b itself",
            id="inside a value",
        ),
        pytest.param(
            "l[2]=1",
            "l[2] is no place in the list l, which has 1 items; expected a place up to l[1], which"
            " appends",
            id="behind the end",
        ),
        pytest.param("l.0=1", "l.0 is no place in the list l, which", id="dotted place"),
        pytest.param("x[1]=1", "x[1] is no place in the list x, which has 0 items", id="new list"),
        pytest.param("a.b=[1", "not valid YAML: ", id="not YAML"),
        pytest.param("a.b=${x}", "'${x}' holds ${", id="interpolation"),
        pytest.param(
            ".".join("a" * 21) + "=1",
            "the path has 21 parts; expected at most 20, no recipe is nested deeper",
            id="too deep",
        ),
    ],
)
def test_what_is_no_override(text: str, message: str) -> None:
    tree = _tree("{a: {b: 1}, l: [{m: 1}]}")
    with pytest.raises(RecipeError) as caught:
        apply_override(tree, text=text, number=2)
    assert str(caught.value).startswith(f"override 2: {text}: {message}")
