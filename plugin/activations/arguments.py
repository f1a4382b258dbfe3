"""The inputs of a unit's call, kept so that a replay can be given the same ones."""

from __future__ import annotations

from typing import Any

import torch

from rematic.activations.kept_values import version_of
from rematic.activations.key_value_cache import CacheBefore
from rematic.activations.nested import map_leaves
from rematic.stash import Handle


class Argument:
    """A tensor argument: a detached alias, since the tensor itself would keep its graph alive.

    (With the tensor, a unit that mutates its input in an aborted step leaks its records for good.)
    """

    __slots__ = ("_alias", "handle", "requires_grad", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        alias = tensor.detach()
        self._alias: torch.Tensor | None = alias
        self.handle: Handle | None = None
        """Stands for the tensor where it was moved, None if it was not."""
        self.requires_grad = tensor.requires_grad
        # of the alias: that of an inference tensor has a version, which itself has none
        self.version = version_of(alias)

    def tensor(self) -> torch.Tensor:
        """Returns the tensor, from where it was moved if it was."""
        if self._alias is not None:
            return self._alias
        assert self.handle is not None, "an argument is held, or was moved"
        return self.handle.get()

    def leave_to(self, handle: Handle) -> None:
        """Leaves the tensor to where it was moved."""
        self.handle, self._alias = handle, None

    @property
    def mutated(self) -> bool:
        """Whether the tensor was changed in place since the call began."""
        return self._alias is not None and version_of(self._alias) != self.version


_LEAVES = (torch.Tensor, torch.Generator)
_KEPT = (Argument, CacheBefore)


class CallArguments:
    """The arguments of one call, their containers rebuilt and their tensors aliased."""

    __slots__ = ("_arguments", "_distinct", "args", "generators", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen: dict[int, Argument] = {}

        def alias(leaf: torch.Tensor | torch.Generator) -> Argument | torch.Generator:
            if isinstance(leaf, torch.Generator):
                self.generators.append(leaf)
                return leaf
            # one alias per tensor: a tensor passed twice is the same tensor in the replay too
            argument = seen.get(id(leaf))
            if argument is None:
                argument = seen[id(leaf)] = Argument(leaf)
            self._arguments.append(argument)
            return argument

        self._arguments: list[Argument] = []
        self.generators: list[torch.Generator] = []
        """Generators among the arguments."""
        self.args = map_leaves(alias, args, leaf=_LEAVES)
        self.kwargs = map_leaves(alias, kwargs, leaf=_LEAVES)
        self._distinct = tuple(seen.values())

    def tensors(self) -> list[Argument]:
        """Returns the tensor arguments in order, repeated ones as often as they occur."""
        return self._arguments

    def aliases(self) -> list[torch.Tensor]:
        """Returns the tensors of the arguments, each once, while none has moved."""
        return [a._alias for a in self._distinct if a._alias is not None]

    def mutated_positions(self) -> list[int]:
        """Returns the positions, among the tensor arguments, of those changed in place."""
        return [i for i, argument in enumerate(self.tensors()) if argument.mutated]

    def rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns fresh containers with fresh leaf tensors, for one replay."""
        leaves: dict[int, Any] = {}

        def leaf(argument: Argument | CacheBefore) -> Any:
            if isinstance(argument, CacheBefore):
                if id(argument) not in leaves:
                    leaves[id(argument)] = argument.made_again()
            elif id(argument) not in leaves:
                tensor = argument.tensor().detach()
                if argument.requires_grad:
                    tensor.requires_grad_()
                leaves[id(argument)] = tensor
            return leaves[id(argument)]

        return (
            map_leaves(leaf, self.args, leaf=_KEPT),
            map_leaves(leaf, self.kwargs, leaf=_KEPT),
        )
