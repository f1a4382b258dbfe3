"""Wraps a method on one instance, and puts back what was there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


class InstanceMethod:
    """Stands in for a method of one object, whose class stays as it is.

    It copies and pickles into the plain method: a copy of the object is not wrapped.

    Args:
        owner: The object.
        name: Name of the method.
        around: Called with the method as it was, then with the arguments of the call.
    """

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._around = around
        self._previous: Callable[..., Any] | None = owner.__dict__.get(name)
        self._original: Callable[..., Any] = getattr(owner, name)
        self._active = True
        owner.__dict__[name] = self

    def remove(self) -> None:
        """Takes itself away, or goes silent under somebody's wrapper; safe to call twice."""
        self._active = False
        if self._owner.__dict__.get(self._name) is not self:
            return
        if self._previous is None:
            del self._owner.__dict__[self._name]
        else:
            self._owner.__dict__[self._name] = self._previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the method takes
        """Calls `around` with the method and the arguments."""
        if not self._active:
            return self._original(*args, **kwargs)
        return self._around(self._original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Returns the plain method of the copy."""
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the plain method."""
        if self._previous is not None:
            return _same, (self._previous,)
        return getattr, (self._owner, self._name)


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method
