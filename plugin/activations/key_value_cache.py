"""Key/value caches in training: an empty one is left out, a filled one keeps the unit held.

Transformers models pass a cache to their layers unless told otherwise, also when they train. A
replay would write it a second time and attend over twice the length (transformers#30320).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(
        getattr(value, "update", None)
    )


def without_empty_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Returns the arguments with empty caches replaced by None, and whether a filled one is left.

    An empty cache adds nothing to the attention of this forward; nobody reads it in training.
    """
    if not any(_is_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs, False
    filled = any(
        _is_cache(value) and value.get_seq_length() > 0 for value in (*args, *kwargs.values())
    )
    if filled:
        return args, kwargs, True
    drop: Callable[[Any], Any] = lambda value: None if _is_cache(value) else value  # noqa: E731
    return tuple(drop(v) for v in args), {k: drop(v) for k, v in kwargs.items()}, False
