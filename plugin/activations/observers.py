"""Forward hooks inside a unit that only look on: a replay leaves them out (contract 4)."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from rematic.activations.torch_private import GLOBAL_HOOKS

_KINDS = ("_forward_pre_hooks", "_forward_hooks")


class Observers:
    """Knows, by the numbers torch gives to hooks, which returned nothing whenever they ran.

    A hook that returns nothing can still act on its module (some gather weights that way), so the
    safety check compares one replay without them before they are left out for good.
    """

    def __init__(self) -> None:
        self._silent: set[int] = set()
        self._acting: set[int] = set()
        # Those that were watched, whether they ran or not.
        self._met: set[int] = set()
        self._around: weakref.ref[nn.Module] | None = None

    def take_own_hooks(self, module: nn.Module, is_inside: bool) -> None:
        """Takes the hooks of the unit itself for observers, if they run inside of what is replayed.

        They do if its whole call was compiled. The compiler would trace whoever watched them, so
        they are not watched: the safety check alone decides.
        """
        self._around = weakref.ref(module) if is_inside else None
        if is_inside:
            found = {n for kind in _KINDS for n in module.__dict__[kind]}
            self._silent |= found - self._acting

    def has_unknown(self, parts: Sequence[nn.Module]) -> bool:
        """Returns whether a hook may run that was never watched."""
        places = [(home, kind) for home, kind in GLOBAL_HOOKS if home[kind]]
        for part in parts:  # before every call: mostly there are none
            home = part.__dict__
            if home["_forward_hooks"] or home["_forward_pre_hooks"]:
                places += [(home, kind) for kind in _KINDS]
        return any(number not in self._met for home, kind in places for number in home[kind])

    @contextlib.contextmanager
    def watching(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Learns from the hooks that run in the body."""
        with _exchanged(parts, self._watched):
            yield

    @contextlib.contextmanager
    def silenced(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Leaves the observers out of the forward that runs in the body."""
        own = None if self._around is None else self._around()
        if own is not None:
            parts = [own, *parts]
        with _exchanged(parts, self._without_observers):
            yield

    def forget(self) -> None:
        """Takes none for an observer any more: a replay without them went wrong."""
        self._acting |= self._silent
        self._silent.clear()

    def num_present(self, parts: Sequence[nn.Module]) -> int:
        """Returns how many hooks that stand on modules now are left out."""
        return sum(n in self._silent for home, kind in _places(parts) for n in home[kind])

    @property
    def num_silent(self) -> int:
        """How many hooks are left out."""
        return len(self._silent)

    def _watched(self, hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
        self._met.update(hooks)
        return OrderedDict((number, self._watch(number, hook)) for number, hook in hooks.items())

    def _watch(self, number: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            if result is not None:
                self._silent.discard(number)
                self._acting.add(number)
            elif number not in self._acting:
                self._silent.add(number)
            return result

        return watched

    def _without_observers(self, hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
        return OrderedDict((n, hook) for n, hook in hooks.items() if n not in self._silent)


@contextlib.contextmanager
def _exchanged(
    parts: Sequence[nn.Module], change: Callable[[OrderedDict[int, Any]], OrderedDict[int, Any]]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for home, kind in _places(parts):
            hooks = home[kind]
            if hooks:
                stack.callback(home.__setitem__, kind, hooks)
                home[kind] = change(hooks)
        yield


def _places(parts: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    yield from GLOBAL_HOOKS
    for part in parts:
        for kind in _KINDS:
            yield part.__dict__, kind
