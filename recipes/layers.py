"""Composes trees: a recipe over the one it extends, and overrides over both."""

from __future__ import annotations

from rematic.recipes.errors import RecipeError
from rematic.recipes.key_paths import KeyPath, format_path, parse_path
from rematic.recipes.tree import Origin, Tree, TreeEntry, TreeList, TreeMap, TreeScalar
from rematic.recipes.yaml_text import MAX_DEPTH, parse_yaml_value


def merge(base: Tree, top: Tree) -> Tree:
    """Lay `top` over `base`: mappings merge key by key, anything else is replaced whole."""
    if not isinstance(base, TreeMap) or not isinstance(top, TreeMap):
        return top
    entries = dict(base.entries)
    for key, entry in top.entries.items():
        below = entries.get(key)
        value = entry.value if below is None else merge(below.value, entry.value)
        entries[key] = TreeEntry(key_origin=entry.key_origin, value=value)
    return TreeMap(entries=entries, origin=top.origin)


def apply_override(tree: TreeMap, *, text: str, number: int) -> TreeMap:
    """Set the one value that the override `key=value` names; the value is YAML.

    `number` counts the overrides from 1, for the origin. A missing section is created, a list can
    grow by one item at its end.

    Raises:
        RecipeError: the text is no override, or its path does not fit the tree.
    """
    origin = Origin(source=f"override {number}: {' '.join(text.split())}")  # one line in messages
    key, separator, value = text.partition("=")
    if not separator:
        raise RecipeError(f"{origin}: no = found; expected key=value, such as training.epochs=2")
    try:
        path = parse_path(key.strip())
    except ValueError as error:
        raise RecipeError(f"{origin}: {error}") from error
    if len(path) > MAX_DEPTH:
        raise RecipeError(
            f"{origin}: the path has {len(path)} parts; expected at most {MAX_DEPTH}, no recipe"
            " is nested deeper"
        )
    if path[0] == "extends":
        raise RecipeError(
            f"{origin}: extends cannot be overridden; write a recipe that extends the other one"
        )
    changed = _assign(tree, path=path, done=0, value=_override_value(value, origin=origin))
    assert isinstance(changed, TreeMap)  # a path has a segment, so the root stays a mapping
    return changed


def _override_value(text: str, *, origin: Origin) -> Tree:
    bare = text.strip()
    if bare.startswith("*"):
        # A glob. In YAML it would begin an alias, which a single value cannot mean.
        return TreeScalar(value=bare, origin=origin)
    return parse_yaml_value(bare, origin=origin)


def _assign(tree: Tree | None, *, path: KeyPath, done: int, value: Tree) -> Tree:
    if done == len(path):
        return value
    key = path[done]
    if tree is None and isinstance(key, int):
        tree = TreeList(items=(), origin=value.origin)
    elif tree is None:
        tree = TreeMap(entries={}, origin=value.origin)
    if isinstance(tree, TreeMap):
        below = tree.entries.get(key)
        old = None if below is None else below.value
        changed = _assign(old, path=path, done=done + 1, value=value)
        key_origin = value.origin if below is None else below.key_origin
        entry = TreeEntry(key_origin=key_origin, value=changed)
        return TreeMap(entries={**tree.entries, key: entry}, origin=tree.origin)
    if isinstance(tree, TreeList):
        return _assign_item(tree, path=path, done=done, value=value)
    raise RecipeError(
        f"{value.origin}: {format_path(path[:done])} is the single value {tree.value!r}"
        f" ({tree.origin}), it has no {format_path((key,))}; set {format_path(path[:done])} itself"
    )


def _assign_item(tree: TreeList, *, path: KeyPath, done: int, value: Tree) -> TreeList:
    index, count, where = path[done], len(tree.items), format_path(path[:done])
    if not isinstance(index, int) or index > count:
        raise RecipeError(
            f"{value.origin}: {format_path(path[: done + 1])} is no place in the list {where},"
            f" which has {count} items; expected a place up to {where}[{count}], which appends"
        )
    old = tree.items[index] if index < count else None
    changed = _assign(old, path=path, done=done + 1, value=value)
    return TreeList(
        items=(*tree.items[:index], changed, *tree.items[index + 1 :]), origin=tree.origin
    )
