"""Finds the units of a model: the blocks of every repeated stack, or what patterns name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from rematic.activations.routers import find_routers, is_router
from rematic.activations.wrappers import without_wrappers
from rematic.policy import match_names

_SHARE_OF_STAGE = 2 / 3
"""The share of a stage's weights that its stack has at least; the rest makes the image smaller."""


def find_units(
    model: nn.Module, patterns: Sequence[str] = (), *, routers: Sequence[str] = ()
) -> list[tuple[str, nn.Module]]:
    """Returns (qualified name, module) of every unit, in the order of the model's modules.

    Without patterns the units are the blocks of every repeated stack: the children of a
    `ModuleList` or `Sequential` that holds two or more modules of one class, each with children of
    its own. Lists within a list are one stack. Only the outermost stack counts (experts inside a
    block belong to the block), but for stages: a block that is little more than a stack of blocks
    gives way to them. Without a repeated stack the blocks of lists that hold only one count (a
    layer that runs several times, a model of one layer).

    Args:
        model: The model, possibly the block itself.
        patterns: Names of units instead of the default search: globs over qualified names or
            class names.
        routers: Patterns that name the routers of mixtures of experts (see `find_routers`), which
            are no units unless a pattern is exactly their name or class.

    Raises:
        ValueError: If a pattern matches nothing, or no repeated stack is found.
    """
    found = _matched(model, patterns) if patterns else _by_default(model)
    found = [pair for pair in found if not _is_unnamed_router(model, pair, patterns, routers)]
    if not found:
        raise ValueError(
            f"found no stack of blocks in {type(model).__name__}: expected a ModuleList or "
            "Sequential of modules that hold others. Name the units in the recipe, "
            f'for example `policy: {{units: ["{_example(model)}"]}}`.'
        )
    return found


def _matched(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    modules = {name: module for name, module in model.named_modules() if name}
    classes = {name: type(module).__name__ for name, module in modules.items()}
    chosen = {
        without_wrappers(name) for pattern in patterns for name in match_names(pattern, classes)
    }
    return [
        (name, modules[name]) for name in modules if name in chosen and _outermost(name, chosen)
    ]


def _is_unnamed_router(
    model: nn.Module,
    found: tuple[str, nn.Module],
    patterns: Sequence[str],
    routers: Sequence[str],
) -> bool:
    name, module = found
    if name in patterns or type(module).__name__ in patterns:
        return False
    parent = model.get_submodule(name.rpartition(".")[0])
    return is_router(module, name, parent, routers)


def _outermost(name: str, chosen: set[str]) -> bool:
    parts = name.split(".")
    return not any(".".join(parts[:i]) in chosen for i in range(1, len(parts)))


def _by_default(model: nn.Module) -> list[tuple[str, nn.Module]]:
    repeated = _each_once(_stacks(model, "", _repeated_blocks))
    return repeated or _each_once(_stacks(model, "", _listed_blocks))


def _each_once(found: Iterator[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    # a stack that two parts of the model share is reached twice; its first name counts
    names: dict[nn.Module, str] = {}
    for name, module in found:
        names.setdefault(module, name)
    return [(name, module) for module, name in names.items()]


def _stacks(
    module: nn.Module,
    prefix: str,
    blocks_of: Callable[[nn.Module], list[tuple[str, nn.Module]]],
) -> Iterator[tuple[str, nn.Module]]:
    blocks = blocks_of(module)
    for key, block in blocks:
        stage = _stack_of_stage(block)
        if stage is None:
            yield f"{prefix}{key}", block
        else:
            yield from _stacks(getattr(block, stage), f"{prefix}{key}.{stage}.", blocks_of)
    if not blocks:
        for name, child in module.named_children():
            yield from _stacks(child, f"{prefix}{name}.", blocks_of)


def _repeated_blocks(container: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return []
    blocks = _members(container)
    classes = [type(block) for _, block in blocks]
    repeated = any(classes.count(cls) > 1 for cls in classes)
    return blocks if repeated else []


def _listed_blocks(container: nn.Module) -> list[tuple[str, nn.Module]]:
    return _members(container) if isinstance(container, nn.ModuleList) else []


def _members(container: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Returns the blocks of a list; of a list in it, which is never called, the blocks of that."""
    found = []
    for key, child in container.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _members(child, f"{prefix}{key}.")
        elif _is_block(child):
            found.append((f"{prefix}{key}", child))
    return found


def _stack_of_stage(block: nn.Module) -> str | None:
    """Returns the name of the stack that a block mostly consists of, None if it is no stage.

    The members of a stage are blocks themselves: they hold modules that hold others. (Experts are
    a few layers each, and beside their router.)
    """
    if find_routers(block):
        return None
    for name, child in block.named_children():
        members = [member for _, member in _repeated_blocks(child)]
        nested = [any(map(_is_block, member.children())) for member in members]
        if nested and all(nested) and _num_weights(child) >= _SHARE_OF_STAGE * _num_weights(block):
            return name
    return None


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _example(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if name and _is_block(module)]
    return names[0] if names else "layers.*"
