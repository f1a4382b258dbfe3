"""What every section does with a value that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from rematic.recipes.field_checks import FieldError


def assert_refused(
    build: Callable[..., object], values: Mapping[str, object], *, message: str
) -> None:
    """The message is exactly this one, and begins with the field that it is about."""
    with pytest.raises(FieldError) as caught:
        build(**values)
    assert str(caught.value) == message
    assert caught.value.field == message.split()[0]
