"""The action `tile`: one call of a token-wise unit as several, each with a record of its own."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rematic.activations.ambient import capture_ambient, generators_moved, restore_generators
from rematic.activations.collectives import watching_collectives
from rematic.activations.nested import iter_leaves, map_leaves
from rematic.activations.notices import words_of
from rematic.activations.replay import announced_as_replay
from rematic.activations.surroundings import Surroundings
from rematic.activations.tile import join_tiles, sequence_length, tile_calls
from rematic.activations.token_wise import Objection, objection_to_tiles
from rematic.activations.torch_private import GLOBAL_HOOKS
from rematic.policy import Tile

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

_log = logging.getLogger("rematic")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST_TRIALS = 3
"""Calls that may answer with an objection which is not final until it is taken for final."""
_EXCHANGES = "what other ranks get, since it exchanges tensors with them"
_DRAWS = "it draws random numbers, and slices would draw others"


class Tiling:
    """Runs one unit in slices once a tiny input has proved that it may; whole otherwise.

    Every slice is a record that starts evicted, so backward needs memory for one slice at a time.
    """

    def __init__(self, action: Tile) -> None:
        self.action = action
        self.objection: str | None = None
        """Why the last call ran whole, None if it did not."""
        # By the mode of the unit and its parts: dropout is a reason in training only.
        self._answers: dict[tuple[bool, ...], str | None] = {}
        self._trials: Counter[tuple[tuple[bool, ...], str]] = Counter()
        self._told: set[str] = set()
        self._are_contiguous: tuple[bool, ...] | None = None
        """Of the tensors of the whole call, while slices run."""

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of `unit`."""
        try:
            length = sequence_length(args, kwargs, dim=self.action.dim)
        except ValueError as error:
            self._say_why_whole(unit, str(error))
            return unit.run(args, kwargs)
        if min(length, self.action.slices_of(length)) < 2:
            return unit.run(args, kwargs)
        objection = self._objection(unit, args, kwargs)
        if objection is None:
            tensors = list(iter_leaves((args, kwargs)))
            devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
            ambient = capture_ambient(tuple(sorted(devices, key=str)))
            output = self._run_in_slices(unit, args, kwargs, tensors)
            if not generators_moved(ambient):
                return output
            # dropout that was turned on since: as if the slices had not run
            del output
            restore_generators(ambient)
            objection = self._answers[_mode(unit)] = _DRAWS
        self._say_why_whole(unit, objection)
        return unit.run(args, kwargs)

    def body(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what a record runs: slices of contiguous tensors become contiguous inside of it.

        A record then holds views of the whole input, and no copy of it.
        """
        if self._are_contiguous is None:
            return forward
        return functools.partial(_on_contiguous, forward, self._are_contiguous)

    def _run_in_slices(
        self,
        unit: Unit,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        dim = self.action.dim
        num_tiles = self.action.slices_of(sequence_length(args, kwargs, dim=dim))
        outputs, lengths = [], []
        self._are_contiguous = tuple(tensor.is_contiguous() for tensor in tensors)
        try:
            for tile_args, tile_kwargs in tile_calls(
                args, kwargs, num_tiles=num_tiles, dim=dim, copies=False
            ):
                lengths.append(sequence_length(tile_args, tile_kwargs, dim=dim))
                outputs.append(unit.run(tile_args, tile_kwargs))
        finally:
            self._are_contiguous = None
        return join_tiles(outputs, lengths, dim=dim)

    def _objection(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        hooks = _hooks_on_parts(unit.module)
        if hooks is not None:
            return f"{hooks} would see every slice instead of the whole"
        mode = _mode(unit)
        if mode not in self._answers:
            found = _trial(unit, args, kwargs, dim=self.action.dim)
            if found is not None and not found.is_final:
                self._trials[mode, found.text] += 1
                if self._trials[mode, found.text] < _MOST_TRIALS:
                    return found.text
            self._answers[mode] = None if found is None else found.text
            if found is None:
                self.objection = None
                unit.tell("tile", "runs in slices: gradients of its weights are summed by slice")
        return self._answers[mode]

    def _say_why_whole(self, unit: Unit, objection: str) -> None:
        self.objection = objection
        words = words_of(objection)
        if words not in self._told:
            self._told.add(words)
            _log.warning("unit %r is recomputed whole and not in slices: %s.", unit.name, objection)
            unit.tell("tile", f"is recomputed whole and not in slices: {objection}")


def _mode(unit: Unit) -> tuple[bool, ...]:
    return tuple(part.training for part in unit.module.modules())


def _trial(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], *, dim: int
) -> Objection | None:
    routers = () if unit.routing is None else unit.routing.modules()

    def survey() -> Callable[[], str | None]:
        surroundings = Surroundings(unit.module, (args, kwargs), left_out=routers)
        # (a collective: slices of other lengths would begin another number of them)
        return lambda: surroundings.change() if unit.joint is None else _EXCHANGES

    with announced_as_replay(), watching_collectives(unit):
        return objection_to_tiles(
            unit.module, args, kwargs, dim=dim, forward=unit.original, survey=survey
        )


def _hooks_on_parts(module: nn.Module) -> str | None:
    """Names hooks that run more than once in slices; those of the unit see the whole call."""
    parts = [(name, part) for name, part in module.named_modules() if name]
    for name, part in parts:
        if any(part.__dict__.get(kind) for kind in _HOOKS):
            return f"hooks on its part {name!r}"
    if parts and any(home[kind] for home, kind in GLOBAL_HOOKS):
        return "hooks on all modules"
    return None


def _on_contiguous(
    forward: Callable[..., Any], are_contiguous: tuple[bool, ...], *args: Any, **kwargs: Any
) -> Any:
    flags = iter(are_contiguous)

    def as_in_whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous() if next(flags) else tensor

    args, kwargs = map_leaves(as_in_whole, (args, kwargs))
    return forward(*args, **kwargs)
