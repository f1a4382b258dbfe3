"""Puts the retry at the op around what hosts do to gradients before an optimizer steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rematic.hosts.instance_method import InstanceMethod
from rematic.session import Session


def cover_methods(
    owner: object, names: Sequence[str], session: Callable[[], Session | None]
) -> list[InstanceMethod]:
    """Wraps methods that clip or unscale gradients; returns what takes the wrappers away.

    Args:
        owner: Whose methods they are.
        names: Their names.
        session: Returns the session that covers them; None: they run as they are.
    """

    def covered(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the method's
        covering = session()
        if covering is None:
            return method(*args, **kwargs)
        return covering.run_on_gradients(functools.partial(method, *args, **kwargs))

    return [InstanceMethod(owner, name, covered) for name in names]
