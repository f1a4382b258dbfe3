"""Finds the routers of mixtures of experts, which decide where a token goes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn

_CLASSES = ("*Router", "*TopKGat*", "*TopkGat*", "*MoE*Gate", "*Moe*Gate")
_NAMES = frozenset({"router", "gate"})
"""What the router is mostly called beside a module called `experts`."""


def find_routers(
    module: nn.Module, patterns: Sequence[str] = (), *, prefix: str = ""
) -> list[nn.Module]:
    """Returns the routers inside `module`, the outermost of nested ones, each once.

    Args:
        module: Where to look.
        patterns: Globs over qualified names or over class names. Without any, a router is what has
            a class such as `MixtralTopKRouter`, or is called `router` or `gate` beside `experts`.
        prefix: Qualified name of `module` in the model, with a dot at its end.
    """
    return list(dict.fromkeys(_routers(module, tuple(patterns), prefix)))


def refuse_idle_patterns(model: nn.Module, patterns: Sequence[str]) -> None:
    """Refuses patterns that name no module.

    Raises:
        ValueError: If one matches neither a qualified name nor a class (contract 8).
    """
    for pattern in patterns:
        if not any(is_router(part, name, None, (pattern,)) for name, part in model.named_modules()):
            raise ValueError(
                f"the router pattern {pattern!r} matches no module: expected a glob over qualified "
                "names or class names, such as '*.mlp.gate' or '*Router'."
            )


def is_router(
    module: nn.Module, name: str, parent: nn.Module | None, patterns: Sequence[str]
) -> bool:
    """Returns whether a module is a router (see `find_routers`).

    Args:
        module: The module.
        name: Its qualified name.
        parent: The module that holds it, None for a model itself.
        patterns: As above.
    """
    kind = type(module).__name__
    if patterns:
        return any(_names(pattern, name, kind) for pattern in patterns)
    if any(fnmatch.fnmatchcase(kind, pattern) for pattern in _CLASSES):
        return True
    return name.rpartition(".")[2] in _NAMES and "experts" in getattr(parent, "_modules", {})


def _names(pattern: str, name: str, kind: str) -> bool:
    """Whether a pattern means a module; of a path it may leave out how it begins."""
    if any(fnmatch.fnmatchcase(one, pattern) for one in (name, kind)):
        return True
    return "." in pattern and fnmatch.fnmatchcase(name, f"*.{pattern}")


def _routers(module: nn.Module, patterns: tuple[str, ...], prefix: str) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if is_router(child, prefix + name, module, patterns):
            yield child
        else:
            yield from _routers(child, patterns, f"{prefix}{name}.")
