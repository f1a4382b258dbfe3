"""Checkpointing of others inside a model: turned off while rematic manages it, then given back.

Two owners of one module would run its forward three times, or move what the other has moved
(contract 8). What lies beside every unit keeps its owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rematic.activations import torch_private
from rematic.activations.instance_forward import InstanceForward
from rematic.activations.wrappers import CHECKPOINTED

_log = logging.getLogger("rematic")
_FLAG = "gradient_checkpointing"
"""What transformers and those who follow it set on a module whose forward checkpoints."""


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """One module whose checkpointing was turned off."""

    name: str
    """Qualified name of the module, "" for the model itself."""

    owner: str
    """Whose checkpointing it was."""


class OtherOwners:
    """Turns the checkpointing of others off, and on again when rematic goes.

    Args:
        model: The model.
        units: Its units by qualified name. A module is taken over if it is one, holds one or is
            inside of one.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self.taken_over: list[TakenOver] = []
        self._give_back: list[Callable[[], None]] = []
        related = list(_related(model, tuple(units)))
        self._flagged = [(name, m) for name, m in related if hasattr(m, _FLAG)]
        for name, module in related:
            self._take_wrapper(name, module)
            self._take_composable(name, module)
        self.take_flags()

    def take_flags(self) -> list[TakenOver]:
        """Turns off the flags that are on, also those set since the last time.

        Returns:
            What was taken over now.
        """
        found = [(name, m) for name, m in self._flagged if getattr(m, _FLAG, False) is True]
        for _, module in found:
            setattr(module, _FLAG, False)
            self._give_back.append(_setter(module))
        return self._note(found, "gradient checkpointing")

    def give_back(self) -> None:
        """Turns everything on again."""
        while self._give_back:
            self._give_back.pop()()

    def _take_wrapper(self, name: str, module: nn.Module) -> None:
        wrapped = module._modules.get(CHECKPOINTED)
        if wrapped is None or "forward" in module.__dict__:
            return

        def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        self._give_back.append(InstanceForward(module, around).remove)
        self._note([(name, module)], type(module).__name__)

    def _take_composable(self, name: str, module: nn.Module) -> None:
        state = torch_private.composable_checkpoint_state(module)
        if state is not None and state.enable_hook:
            state.enable_hook = False
            self._give_back.append(lambda: setattr(state, "enable_hook", True))
            self._note([(name, module)], "torch.distributed's composable checkpoint")

    def _note(self, found: list[tuple[str, nn.Module]], owner: str) -> list[TakenOver]:
        taken = [TakenOver(name=name, owner=owner) for name, _ in found]
        self.taken_over += taken
        if taken:
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            _log.warning(
                "%s of %r%s is turned off while rematic is attached, which decides instead.",
                owner,
                taken[0].name or "the model",
                more,
            )
        return taken


def _setter(module: nn.Module) -> Callable[[], None]:
    return lambda: setattr(module, _FLAG, True)


def _related(model: nn.Module, units: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    inside = tuple(f"{unit}." for unit in units)
    for name, module in model.named_modules():
        above = f"{name}." if name else ""
        if name in units or name.startswith(inside) or any(u.startswith(above) for u in units):
            yield name, module
