"""What stood on the modules of a unit before its forward, so that what it makes is told apart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from rematic.activations.module_walk import Part

_Home = dict[str, Any]


class StandingNames:
    """Names of attributes, children, parameters and buffers, module by module."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[
            tuple[nn.Module, Collection[str], Part, tuple[str, ...], tuple[str, ...]]
        ] = []

    def add(self, module: nn.Module, known: Part) -> None:
        """Takes down one module, of which something is known already."""
        present = module.__dict__
        names = tuple(present) if known.plain is None else known.plain.names
        self._parts.append(
            (module, names, known, tuple(module._parameters), tuple(module._buffers))
        )

    def remove_new(self) -> None:
        """Removes what a forward that failed has made: its next attempt makes it again."""
        for module, names, known, parameters, buffers in self._parts:
            _remove(module._parameters, parameters)
            _remove(module._buffers, buffers)
            if module._modules != known.children:
                module._modules.clear()
                module._modules.update(known.children)
            _remove(module.__dict__, names)

    def hide_new(self) -> Callable[[], None]:
        """Shows a replay nothing that its forward has made, so that it makes it again.

        (It would add to a buffer a second time, and draw fewer random numbers where weights were
        drawn.)

        Returns:
            What shows it again.
        """
        hidden: list[tuple[_Home, Collection[str], _Home]] = []
        for module, names, known, parameters, buffers in self._parts:
            homes: tuple[tuple[_Home, Collection[str]], ...] = (
                (module._parameters, parameters),
                (module._buffers, buffers),
                (module._modules, known.children),
                (module.__dict__, names),
            )
            for home, standing in homes:
                new = home.keys() - set(standing)
                if new:
                    hidden.append((home, standing, {n: home[n] for n in home if n in new}))
                    _remove(home, standing)

        def show() -> None:
            for home, standing, made in hidden:
                _remove(home, standing)  # what the replay has made
                home.update(made)

        return show


def _remove(home: _Home, standing: Collection[str]) -> None:
    for name in home.keys() - set(standing):
        del home[name]
