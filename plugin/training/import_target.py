"""Imports the class that a recipe names by `_target_`."""

from __future__ import annotations

from rematic.quiet_import import import_quietly
from rematic.recipes.errors import nearest

ALLOWED_MODULES = ("torch.optim", "bitsandbytes.optim")
"""Modules whose classes a recipe may name without `--allow-code`."""


def import_target(path: str, *, base: type, key: str, allow_code: bool) -> type:
    """The class at an import path.

    A module is imported, and so its code run, only if it is on the allow-list or `allow_code`.

    Args:
        path: Such as `torch.optim.RMSprop`.
        base: Class of which it must be a subclass.
        key: Where the recipe names it, for messages.
        allow_code: Whether modules outside the allow-list may be imported.

    Raises:
        ValueError: It is not on the list, does not exist, or is no such class.
    """
    module_name, _, name = path.rpartition(".")
    if module_name not in ALLOWED_MODULES and not allow_code:
        raise ValueError(
            f"{key} is {path!r}, which is outside {' and '.join(ALLOWED_MODULES)}: importing it "
            "runs its code; expected a class of these modules. Where you trust the recipe, run "
            "rematic train --allow-code"
        )
    try:
        module = import_quietly(module_name)
    except ImportError as error:
        raise ValueError(
            f"{key} is {path!r}, but {module_name} cannot be imported ({error}); expected the "
            "import path of a class: correct it, or install what it needs"
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        known = [each for each, kind in vars(module).items() if _is_public(each, kind, base)]
        raise ValueError(
            f"{key} is {path!r}, which is no {base.__name__}{nearest(name, known)}; expected the "
            f"import path of a subclass of {base.__module__}.{base.__name__}"
        )
    return found


def _is_public(name: str, found: object, base: type) -> bool:
    return not name.startswith("_") and isinstance(found, type) and issubclass(found, base)
