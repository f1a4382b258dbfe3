"""Imports what only some recipes need."""

from __future__ import annotations

from types import ModuleType

from rematic.quiet_import import import_quietly


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Imports a module that comes with an extra of this package.

    Args:
        module: The module.
        extra: The extra that brings it.
        needed_by: What the recipe says that needs it.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return import_quietly(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{needed_by} needs {package}, which cannot be imported ({error}); install it by "
            f"pip install 'rematic[{extra}]'"
        ) from error
