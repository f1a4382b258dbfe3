"""Nested arguments: tensors found in order, containers rebuilt or put back."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rematic.activations.nested import ContainerContents, iter_leaves, map_leaves


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Open:
    x: Any
    extra: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Closed:
    x: Any


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


class Mark:
    """Stands for a tensor, as an alias does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Items(list[Any]):
    """A list with something of its own."""

    label = ""


def _items(*values: Any) -> Items:
    items = Items(values)
    items.label = "kept"
    return items


T = torch.tensor
NESTED: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, [b]],
    "dict": lambda a, b: {"k": a, 3: {"n": b}},
    "ordered": lambda a, b: collections.OrderedDict(k=a, n=b),
    "default dict": lambda a, b: collections.defaultdict(list, k=a, n=b),
    "user dict": lambda a, b: collections.UserDict(k=a, n=b),
    "named tuple": lambda a, b: Point(a, Point(b, 1)),
    "dataclass": lambda a, b: Open(Closed((a, b))),
    "slots": lambda a, b: Slotted([a, b]),
    "list subclass": lambda a, b: _items(a, b),
    "with other things": lambda a, b: [None, a, "text", 3, b, torch.Size([1]), object],
}


@pytest.mark.parametrize("build", NESTED.values(), ids=NESTED.keys())
def test_tensors_are_mapped_and_containers_built_anew(build: Callable[[Any, Any], Any]) -> None:
    a, b = T(1.0), T(2.0)
    value = build(a, b)
    assert [id(leaf) for leaf in iter_leaves(value)] == [id(a), id(b)]
    mapped = map_leaves(Mark, value)
    assert [mark.tensor for mark in iter_leaves(mapped, leaf=Mark)] == [a, b]
    assert type(mapped) is type(value)
    assert mapped is not value
    assert [id(leaf) for leaf in iter_leaves(value)] == [id(a), id(b)], "the original is untouched"
    assert getattr(mapped, "label", "kept") == "kept"


def test_what_torch_returns_is_rebuilt_as_such() -> None:
    result = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)
    mapped = map_leaves(torch.Tensor.detach, result)
    assert type(mapped) is type(result)
    assert mapped.values.tolist() == [3.0]
    assert mapped.values is not result.values


def test_a_read_only_mapping_becomes_a_dictionary() -> None:
    assert map_leaves(float, types.MappingProxyType({"k": T(1.0)})) == {"k": 1.0}


def test_what_is_no_container_is_returned_as_it_is() -> None:
    thing = object()
    for value in (None, 3, "text", thing, Open, torch.Size([2])):
        assert map_leaves(torch.Tensor.detach, value) is value
        assert list(iter_leaves(value)) == []


trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), children, max_size=3)
        | children.map(Open)
        | st.builds(Point, children, children)
    ),
    max_leaves=12,
)


@given(trees)
def test_mapping_nothing_gives_an_equal_tree(tree: Any) -> None:
    assert map_leaves(lambda leaf: leaf, tree, leaf=int) == tree


@given(trees)
def test_leaves_come_in_the_order_of_the_mapping(tree: Any) -> None:
    met: list[int] = []
    map_leaves(met.append, tree, leaf=int)
    assert met == list(iter_leaves(tree, leaf=int))


def _spoil(value: Any) -> None:
    """Changes every container it finds, as a forward that failed half-way may have."""
    if isinstance(value, list):
        for item in value:
            _spoil(item)
        value[:] = ["spoilt", *reversed(value)]
    elif isinstance(value, dict):
        for item in value.values():
            _spoil(item)
        value.pop(next(iter(value), None), None)
        value["spoilt"] = 1
    elif isinstance(value, tuple):
        for item in value:
            _spoil(item)
    elif isinstance(value, Open):
        _spoil(value.x)
        value.x = "spoilt"


@given(trees)
def test_contents_are_put_back_in_place(tree: Any) -> None:
    before = copy.deepcopy(tree)
    contents = ContainerContents((tree,))
    _spoil(tree)
    contents.restore()
    assert tree == before


def test_contents_that_did_not_change_are_not_written() -> None:
    class Strict(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise AssertionError("written")

        def __delitem__(self, key: str) -> None:
            raise AssertionError("deleted")

    value = Strict(a=T(1.0))
    ContainerContents((value,)).restore()
    assert list(value) == ["a"]
