"""Key/value caches in training: forward fills them as ever, replays write to copies of before.

Transformers models pass a cache to their layers unless told otherwise, also when they train. A
replay that got the same cache would write it a second time and attend over twice the length
(transformers#30320). A unit whose part of the cache was filled before is kept for that call.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

# Any: a cache is whatever a model's library makes of it.
Cache: TypeAlias = Any
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
FILLS_CACHE = (
    "a key/value cache is filled, which keeps the keys and values of every layer in memory as long "
    "as the model's output lives. Pass `use_cache=False` in training to do without"
)
"""What the log says of a cache in training."""
_PARTS = ("self_attention_cache", "cross_attention_cache")


class CacheBefore:
    """What a cache was before a call, without what other layers keep in it.

    Args:
        cache: The cache.
        own: The layers of it that the unit writes, which are empty.
    """

    def __init__(self, cache: Cache, own: Sequence[Any]) -> None:
        room = _room(cache)
        kept = {id(layer): _rebuilt(layer, torch.clone, room=room) for layer in own}
        self._own = {id(layer): layer for layer in kept.values()}
        self._cache = _rebuilt(cache, _without_values, room=room, instead=kept)

    def made_again(self) -> Cache:
        """Returns a cache for one replay."""
        room = _room(self._cache)
        own = {id(layer): _rebuilt(layer, torch.clone, room=room) for layer in self._own.values()}
        return _rebuilt(self._cache, lambda tensor: tensor, room=room, instead=own)


class CachesOfCall:
    """The caches that one call of a unit is given.

    Args:
        module: The unit.
        call: Its arguments.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        args, kwargs = call
        self._before: dict[int, CacheBefore] = {}
        self._contents: list[tuple[Any, Any]] = []
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if not caches:
            self.is_filled = False
            return
        numbers = _layers_of(module)
        self.is_filled = any(_is_filled(cache, numbers) for cache in caches)
        """Whether the unit's own part of a cache was filled before."""
        for cache in {id(cache): cache for cache in caches}.values():
            self._contents += _contents_of(cache, room=_room(cache))
            if not self.is_filled:
                self._before[id(cache)] = CacheBefore(cache, _own_layers(cache, numbers) or ())

    @property
    def are_written(self) -> bool:
        """Whether forward writes to a cache that was empty."""
        return bool(self._before)

    def for_record(self, call: Call) -> Call:
        """Returns the arguments with what empty caches were before in their place."""
        if not self._before:
            return call
        args, kwargs = call
        before: Callable[[Any], Any] = lambda value: self._before.get(id(value), value)  # noqa: E731
        return tuple(map(before, args)), {key: before(value) for key, value in kwargs.items()}

    def restore(self) -> None:
        """Makes the caches hold what they held, after a forward that failed."""
        for container, contents in self._contents:
            if isinstance(container, list):
                container[:] = contents
            else:
                container.clear()
                container.update(contents)


def holds_cache(call: Call) -> bool:
    """Returns whether an argument of a call is a key/value cache."""
    args, kwargs = call
    return any(map(_is_cache, (*args, *kwargs.values())))


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(
        getattr(value, "update", None)
    )


def _layers_of(module: nn.Module) -> set[int]:
    """Returns the numbers that the modules of a unit have in a cache."""
    numbers = {part.__dict__.get("layer_idx") for part in module.modules()}
    return {number for number in numbers if isinstance(number, int)}


def _own_layers(cache: Cache, numbers: set[int]) -> list[Any] | None:
    """Returns the layers of a cache with these numbers, None if it does not tell its layers."""
    parts = [getattr(cache, name) for name in _PARTS if hasattr(cache, name)] or [cache]
    layers = [part.layers for part in parts if isinstance(getattr(part, "layers", None), list)]
    if not (numbers and layers):
        return None
    return [part[number] for part in layers for number in numbers if number < len(part)]


def _is_filled(cache: Cache, numbers: set[int]) -> bool:
    own = _own_layers(cache, numbers)
    if own is None:
        return bool(cache.get_seq_length() > 0)
    return any(map(_is_layer_filled, own))


def _is_layer_filled(layer: Any) -> bool:
    length = getattr(layer, "get_seq_length", None)
    if length is not None:
        return bool(length() > 0)
    return any(tensor.numel() > 0 for tensor in _tensors_in(vars(layer).values()))


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())


def _room(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _is_part(value: Any, room: str) -> bool:
    return (
        _room(value) == room
        and isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (nn.Module, type))
        and not type(value).__name__.endswith("Config")
    )


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    # its shape is its length, which layers ask for; its values belong to another layer's graph
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _rebuilt(
    value: Any,
    leaf: Callable[[torch.Tensor], torch.Tensor],
    *,
    room: str,
    instead: Mapping[int, Any] = MappingProxyType({}),
) -> Any:
    """Copies a cache with all that it is made of, each part once.

    Args:
        value: The cache, or a part of it.
        leaf: What to put in the place of tensors that hold something.
        room: The package whose objects are parts of the cache.
        instead: What to put in the place of parts, by their identity.
    """
    return _rebuilt_part(value, leaf, room, dict(instead))


def _rebuilt_part(
    value: Any, leaf: Callable[[torch.Tensor], torch.Tensor], room: str, made: dict[int, Any]
) -> Any:
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, torch.Tensor):
        return leaf(value) if value.numel() else value
    inside = functools.partial(_rebuilt_part, leaf=leaf, room=room, made=made)
    if type(value) is tuple:
        return tuple(map(inside, value))
    # entered before what is in it, which may point back (a layer to its cache)
    if type(value) is list:
        items: list[Any] = []
        made[id(value)] = items
        items.extend(map(inside, value))
        return items
    if type(value) is dict:
        entries: dict[Any, Any] = {}
        made[id(value)] = entries
        entries.update((key, inside(item)) for key, item in value.items())
        return entries
    if not _is_part(value, room):
        return value
    rebuilt = copy.copy(value)
    made[id(value)] = rebuilt
    for name, item in vars(value).items():
        rebuilt.__dict__[name] = inside(item)
    return rebuilt


def _contents_of(value: Any, *, room: str) -> Iterator[tuple[Any, Any]]:
    """Yields what a cache is made of: each list and dictionary once, with a copy of it."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is list:
            yield value, list(value)
            waiting += value
        elif type(value) is tuple:
            waiting += value
        elif type(value) is dict or _is_part(value, room):
            home = value if type(value) is dict else vars(value)
            yield home, dict(home)
            waiting += home.values()
