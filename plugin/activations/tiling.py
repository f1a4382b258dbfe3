"""The action `tile`: one call of a token-wise unit as several, each with a record of its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rematic.activations.nested import map_leaves
from rematic.activations.replay import announced_as_replay
from rematic.activations.tile import join_tiles, sequence_length, tile_calls
from rematic.activations.token_wise import objection_to_tiles
from rematic.policy import Tile

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

_log = logging.getLogger("rematic")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Tiling:
    """Runs one unit in slices once a tiny input has proved that it may; whole otherwise.

    Every slice is a record that starts evicted, so backward needs memory for one slice at a time.
    """

    def __init__(self, action: Tile) -> None:
        self.action = action
        self.objection: str | None = None
        """Why the unit runs whole, None if it does not."""
        # By mode: dropout is a reason in training only.
        self._objections: dict[bool, str | None] = {}

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of `unit`."""
        dim = self.action.dim
        try:
            length = sequence_length(args, kwargs, dim=dim)
        except ValueError as error:
            self._run_whole_from_now_on(unit, str(error))
            return unit.run(args, kwargs)
        if length < 2 or not self._is_accepted(unit, args, kwargs):
            return unit.run(args, kwargs)
        outputs, lengths = [], []
        for tile_args, tile_kwargs in tile_calls(
            args, kwargs, num_tiles=self.action.slices_of(length), dim=dim, copies=False
        ):
            lengths.append(sequence_length(tile_args, tile_kwargs, dim=dim))
            outputs.append(unit.run(tile_args, tile_kwargs))
        return join_tiles(outputs, lengths, dim=dim)

    def body(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what a record of a slice runs: slices become contiguous inside of it.

        A record then holds views of the whole input, and no copy of it.
        """
        return functools.partial(_on_contiguous, forward)

    def _is_accepted(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        training = unit.module.training
        if training not in self._objections:
            objection = _objection(unit, args, kwargs, dim=self.action.dim)
            if objection is None:
                self._objections[training] = None
                unit.tell("tile", "runs in slices: gradients of its weights are summed by slice")
            else:
                self._run_whole_from_now_on(unit, objection)
        return self._objections[training] is None

    def _run_whole_from_now_on(self, unit: Unit, objection: str) -> None:
        training = unit.module.training
        if self._objections.get(training, "") != objection:
            self._objections[training] = self.objection = objection
            _log.warning("unit %r is recomputed whole and not in slices: %s.", unit.name, objection)
            unit.tell("tile", f"is recomputed whole and not in slices: {objection}")


def _objection(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], *, dim: int
) -> str | None:
    hooked = _hooked_part(unit.module)
    if hooked is not None:
        return f"hooks on its part {hooked!r} would see every slice instead of the whole"
    with announced_as_replay():
        return objection_to_tiles(unit.module, args, kwargs, dim=dim, forward=unit.original)


def _hooked_part(module: nn.Module) -> str | None:
    # those of the module itself see the whole call
    for name, part in module.named_modules():
        if name and any(part.__dict__.get(kind) for kind in _HOOKS):
            return str(name)
    return None


def _on_contiguous(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = map_leaves(torch.Tensor.contiguous, (args, kwargs))
    return forward(*args, **kwargs)
