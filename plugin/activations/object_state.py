"""Objects of classes of a module author's own, as a forward saw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import TypeAlias

import torch

from rematic.activations.kept_values import (
    CLONED_BUFFER_BYTES,
    CONTAINERS,
    Value,
    copied,
    is_plain_object,
    same_contents,
    version_of,
    without_graph,
)

Attributes: TypeAlias = dict[str, Value]
Place: TypeAlias = tuple[Attributes, str, str]
"""Where an object stands: `__dict__` of a module, name in it, full name."""


_FRAMEWORKS = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed"}
)


class ObjectCopy:
    """An object inside of another one: its class and a copy of its attributes."""

    __slots__ = ("contents", "kind")

    def __init__(self, kind: type, contents: Attributes) -> None:
        self.kind = kind
        self.contents = contents


class ObjectContents:
    """The attributes of one object, copied, and what tells whether it still has the same.

    Objects inside of it are copied too; objects inside of those are not.

    Args:
        value: The object.
        clones_all: Whether large tensors are cloned like small ones, as they may change.
    """

    __slots__ = ("_atoms", "_nested", "_tensors", "attributes", "has_graph", "identity", "kind")

    def __init__(self, value: Value, *, clones_all: bool) -> None:
        self.kind = type(value)
        self.identity = id(value)
        self.has_graph = False
        """Whether a tensor in it needs a gradient, and may keep a graph alive."""
        self._atoms: Attributes = {}
        self._nested: Attributes = {}
        """Containers and objects, copied with the very tensors that they held."""
        self._tensors: list[tuple[str, torch.Tensor, int, bool]] = []
        """Tensors at any depth: the attribute, the tensor, its version, whether it was copied."""
        self.attributes: Attributes = {}
        name = ""

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            # one that needs a gradient is computed anew and not counted up in place
            self.has_graph |= tensor.grad_fn is not None
            if tensor.requires_grad:
                return tensor
            large = tensor.numel() * tensor.element_size() > CLONED_BUFFER_BYTES
            is_copied = clones_all or not large
            self._tensors.append((name, tensor, version_of(tensor), is_copied))
            return tensor.clone() if is_copied else tensor

        for name, item in vars(value).items():
            self.attributes[name] = copy = _copied(item, clone)
            if copy is not item and not isinstance(item, torch.Tensor):
                self._nested[name] = _copied(item, lambda tensor: tensor)
            else:
                self._atoms[name] = item

    def stand(self, value: Value) -> bool:
        """Returns whether an object is the one that was read, with nothing in it changed."""
        if id(value) != self.identity or self.has_graph:
            return False
        present, atoms = value.__dict__, self._atoms
        return (
            present.keys() == self.attributes.keys()
            and all(map(is_, map(present.__getitem__, atoms), atoms.values()))
            and (not self._tensors or all(version_of(t) == v for _, t, v, _ in self._tensors))
            and (not self._nested or self._nested_stand(present))
        )

    def _nested_stand(self, present: Attributes) -> bool:
        return all(_is_same(held, present[name]) for name, held in self._nested.items())

    def changed_tensor(self) -> str | None:
        """Returns the name of a tensor that was changed in place, if there is no copy of it."""
        if not self._tensors:
            return None
        for name, tensor, version, is_copied in self._tensors:
            if not is_copied and version_of(tensor) != version:
                return name
        return None

    def leave_graph(self) -> None:
        """Lets go of everything that could keep a graph alive."""
        self.attributes = {k: _copied(v, without_graph) for k, v in self.attributes.items()}
        self._atoms.clear()
        self._nested.clear()
        self._tensors.clear()


class ObjectState:
    """One object that is an attribute of modules, as forward saw it.

    A replay is shown one that looks as it did, whoever has changed it. Not so those of a framework
    (handles that gather weights, a trainer), which the framework keeps up to date: only if calls of
    the unit themselves are known to change it. The object itself is known only until its forward
    has ended, since it may come to hold an output.

    Args:
        places: Where it stands, in at least one place.
        contents: What it holds.
        changing: Full names of the objects that calls of the unit have changed, shared by all.
        is_lenient: Whether what was None or missing is left alone: the first forward of quantized
            layers makes what they need from weights that are gone afterwards.
    """

    __slots__ = ("_changing", "_contents", "_is_lenient", "_original", "_places", "full_name")

    def __init__(
        self,
        places: Sequence[Place],
        contents: ObjectContents,
        *,
        changing: set[str],
        is_lenient: bool,
    ) -> None:
        home, name, self.full_name = places[0]
        self._places = places
        self._original: Value = home[name]
        self._contents = contents
        self._changing = changing
        self._is_lenient = is_lenient

    @classmethod
    def read(cls, home: Attributes, name: str, full_name: str) -> ObjectState:
        """Copies the attributes of the object called `name`."""
        contents = ObjectContents(home[name], clones_all=False)
        return cls([(home, name, full_name)], contents, changing=set(), is_lenient=True)

    def changed(self) -> bool:
        """Returns whether the same object stands there and its attributes are others now."""
        there = self._there()
        return there is self._original and self._differs(there)

    def is_changed(self) -> bool:
        """Returns whether what stands there is another object, or has other attributes."""
        there = self._there()
        return there is not self._original or self._differs(there)

    def _differs(self, there: Value) -> bool:
        now: Attributes = there.__dict__
        return any(
            name in now and not _has_same_contents(value, now[name])
            for name, value in self._shown().items()
        )

    def changed_tensor(self) -> str | None:
        """Returns the full name of a tensor changed in place of which there is no copy, if any."""
        name = self._contents.changed_tensor()
        return None if name is None else f"{self.full_name}.{name}"

    def restore(self) -> None:
        """Puts the object back with the attributes it had, after a forward that failed."""
        for home, name, _ in self._places:
            home[name] = self._original
        if not self._contents.stand(self._original):
            _put_back(self._original.__dict__, self._shown())

    def show(self) -> tuple[Attributes, Attributes] | None:
        """Puts an object in its place that looks as it did, if it has changed since.

        Returns:
            What the object that stays in its place holds, and a copy of it: a replay may leave
            something else there.
        """
        there = self._there()
        is_left = self._is_of_framework() and self.full_name not in self._changing
        if is_left or self._contents.stand(there):
            held: Attributes = there.__dict__ if is_plain_object(there) else {}
            return held, dict(held)
        shown = _empty(self._contents.kind)
        if self._is_lenient and type(there) is self._contents.kind:
            shown.__dict__.update(vars(there))
        shown.__dict__.update({name: _made_again(item) for name, item in self._shown().items()})
        for home, name, _ in self._places:
            home[name] = shown
        return None

    def note_change(self) -> None:
        """Takes note, when forward has ended, of whether it has changed what a framework holds."""
        if not self._is_of_framework():
            return
        there = self._there()
        if self._contents.stand(there):
            return
        is_other = there is not self._original and is_plain_object(there)
        if is_other or self.changed() or self.changed_tensor() is not None:
            self._changing.add(self.full_name)

    def leave_graph(self) -> None:
        """Lets go of everything that could keep a graph alive."""
        self._original = None
        if self._contents.has_graph:
            self._contents.leave_graph()

    def _is_of_framework(self) -> bool:
        return self._contents.kind.__module__.partition(".")[0] in _FRAMEWORKS

    def _there(self) -> Value:
        home, name, _ = self._places[0]
        return home.get(name)

    def _shown(self) -> Attributes:
        known = self._contents.attributes
        return {k: v for k, v in known.items() if v is not None or not self._is_lenient}


class ObjectWatch:
    """Reads the objects of a unit's modules before each call; those that stand only once."""

    def __init__(self) -> None:
        self._known: dict[int, ObjectContents] = {}
        self._changing: set[str] = set()

    def read(self, places: Sequence[Place], *, is_first: bool) -> list[ObjectState]:
        """Returns the state of every object in these places.

        Args:
            places: The places.
            is_first: Whether nothing is known yet of what forward changes.
        """
        by_object: dict[int, list[Place]] = {}
        for place in places:
            by_object.setdefault(id(place[0][place[1]]), []).append(place)
        states, known = [], {}
        for identity, here in by_object.items():
            home, name, full_name = here[0]
            contents = self._known.get(identity)
            if contents is not None and contents.changed_tensor() is not None:
                self._changing.add(full_name)
            if contents is None or not contents.stand(home[name]):
                clones_all = is_first or full_name in self._changing
                contents = ObjectContents(home[name], clones_all=clones_all)
            if not (is_first or contents.has_graph):
                known[identity] = contents
            states.append(ObjectState(here, contents, changing=self._changing, is_lenient=is_first))
        self._known = known
        return states


def _copied(value: Value, leaf: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """Copies a container or an object; objects inside of either stay as they are."""
    if isinstance(value, ObjectCopy):
        return ObjectCopy(value.kind, {k: copied(v, leaf=leaf) for k, v in value.contents.items()})
    if is_plain_object(value):
        return ObjectCopy(type(value), {k: copied(v, leaf=leaf) for k, v in vars(value).items()})
    return copied(value, leaf=leaf)


def _put_back(present: Attributes, contents: Attributes) -> None:
    for name, item in contents.items():
        if isinstance(item, ObjectCopy) and type(present.get(name)) is item.kind:
            _put_back(present[name].__dict__, item.contents)
        else:
            present[name] = _made_again(item)


def _empty(kind: Value) -> Value:
    return kind.__new__(kind)  # not that of `object`, which refuses namespaces


def _made_again(value: Value) -> Value:
    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.requires_grad else tensor.clone()

    if not isinstance(value, ObjectCopy):
        return copied(value, leaf=leaf)
    made = _empty(value.kind)
    made.__dict__.update({k: copied(v, leaf=leaf) for k, v in value.contents.items()})
    return made


def _is_same(before: Value, now: Value) -> bool:
    """Returns whether a value is what was copied: containers by what they hold, all else itself."""
    kind = type(before)
    if kind is ObjectCopy:
        return type(now) is before.kind and _is_same(before.contents, now.__dict__)
    if kind is not type(now) or not (kind in CONTAINERS or issubclass(kind, tuple)):
        return before is now
    if kind is set:
        return bool(before == now)
    if len(before) != len(now):
        return False
    if isinstance(before, dict):  # mostly of numbers and strings, which are the very same
        if before.keys() != now.keys():
            return False
        before, now = before.values(), [now[key] for key in before]
    return all(map(is_, before, now)) or all(map(_is_same, before, now))


def _has_same_contents(before: Value, now: Value) -> bool:
    if isinstance(before, ObjectCopy):
        return type(now) is before.kind and all(
            key in vars(now) and same_contents(item, vars(now)[key])
            for key, item in before.contents.items()
        )
    return same_contents(before, now)
