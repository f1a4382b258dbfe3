"""State outside of a unit's modules, read shallowly before each call, and shown to replays.

What a first call can reach out there is looked at thoroughly (`surroundings`), and a unit that
changes any of it is kept. Most units change nothing, and some begin later. So the lists,
dictionaries, objects, globals and attributes of classes that were found are read before each call
once more, each by itself, which takes microseconds: there are few. A replay is shown what its
forward saw, and where a call has changed something the next one is looked at thoroughly.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch

from rematic.activations.functions_inside import Place
from rematic.activations.kept_values import is_plain_object, version_of

MAX_HOMES = 64
"""Values that are read before each call; where there are more, none is."""

# Any: whatever the author of a module or its caller keeps.
Value: TypeAlias = Any
Contents: TypeAlias = tuple[Value, ...]


class OutsideWatch:
    """What the calls of one unit can reach outside of its modules.

    Args:
        places: Where values stand that are reached by name.
        values: What was found there and inside of it, with what to call it.
    """

    def __init__(self, places: Sequence[Place], values: Sequence[tuple[str, Value]]) -> None:
        self._places = places
        self._homes = [(label, value) for label, value in values if _is_home(value)]
        self._tensors = [pair for pair in values if isinstance(pair[1], torch.Tensor)]

    def __bool__(self) -> bool:
        """Whether there is anything to read, and not too much."""
        return 0 < len(self._places) + len(self._homes) + len(self._tensors) <= MAX_HOMES

    def read(self) -> OutsideState:
        """Reads what stands there now."""
        return OutsideState(self._places, self._homes, self._tensors)


class OutsideState:
    """What stood outside before a call: the same objects, and what was in each of them."""

    def __init__(
        self,
        places: Sequence[Place],
        homes: Sequence[tuple[str, Value]],
        tensors: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        self._places, self._homes, self._tensors = places, homes, tensors
        self._named = [_get(place) for place in places]
        self._contents = [_contents(home) for _, home in homes]
        self._versions = [version_of(tensor) for _, tensor in tensors]

    def change(self) -> str | None:
        """Says what is not as it was read, None if all is."""
        for place, before in zip(self._places, self._named, strict=True):
            if _get(place) is not before:
                return place.label
        for (label, home), contents in zip(self._homes, self._contents, strict=True):
            if not _are_same(_contents(home), contents):
                return label
        return self.changed_tensor()

    def changed_tensor(self) -> str | None:
        """Names a tensor that was changed in place, which cannot be shown as it was."""
        for (label, tensor), version in zip(self._tensors, self._versions, strict=True):
            if version_of(tensor) != version:
                return label
        return None

    def restore(self) -> None:
        """Puts everything but tensors back to what was read."""
        for place, before in zip(self._places, self._named, strict=True):
            if _get(place) is not before:
                _put(place, before)
        for (_, home), contents in zip(self._homes, self._contents, strict=True):
            if not _are_same(_contents(home), contents):
                _refill(home, contents)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the body what was read, and puts back after it what is there now."""
        now = OutsideState(self._places, self._homes, self._tensors)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _get(place: Place) -> Value:
    home = vars(place.home) if isinstance(place.home, type) else place.home
    return home.get(place.name, _MISSING)


def _put(place: Place, value: Value) -> None:
    if isinstance(place.home, type):
        if value is _MISSING:
            delattr(place.home, place.name)
        else:
            setattr(place.home, place.name, value)
    elif value is _MISSING:
        place.home.pop(place.name, None)
    else:
        place.home[place.name] = value


def _is_home(value: Value) -> bool:
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__)
    is_container = isinstance(value, (list, deque, set, dict))
    return is_container or is_plain_object(value)


def _contents(home: Value) -> Contents:
    """Returns what a value holds; of a mapping all keys, then all values."""
    if isinstance(home, (list, deque, set)):
        return tuple(home)
    if isinstance(home, types.FunctionType):
        return tuple(map(_in_cell, home.__closure__ or ()))
    entries = home if isinstance(home, dict) else home.__dict__
    # not its own methods, which may make what they return
    return (*dict.keys(entries), *dict.values(entries))


def _refill(home: Value, contents: Contents) -> None:
    if isinstance(home, types.FunctionType):
        for cell, value in zip(home.__closure__ or (), contents, strict=True):
            if value is _MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = value
        return
    entries = home if isinstance(home, (list, deque, set, dict)) else home.__dict__
    entries.clear()
    if isinstance(entries, (list, deque)):
        entries.extend(contents)
    elif isinstance(entries, set):
        entries.update(contents)
    else:
        half = len(contents) // 2
        entries.update(zip(contents[:half], contents[half:], strict=True))


def _in_cell(cell: types.CellType) -> Value:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _are_same(now: Contents, before: Contents) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


_MISSING: Value = object()
