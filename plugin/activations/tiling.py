"""The action `tile`: one call of a token-wise unit as several, each with a record of its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rematic.activations.ambient import capture_ambient, generators_moved, restore_generators
from rematic.activations.nested import iter_leaves, map_leaves
from rematic.activations.notices import words_of
from rematic.activations.tile import join_tiles, sequence_length, tile_calls
from rematic.activations.tile_proof import TileProof
from rematic.policy import Tile

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

_log = logging.getLogger("rematic")


class Tiling:
    """Runs one unit in slices once a tiny input has proved that it may; whole otherwise.

    Every slice is a record that starts evicted, so backward needs memory for one slice at a time.
    """

    def __init__(self, action: Tile) -> None:
        self.action = action
        self.objection: str | None = None
        """Why the last call ran whole, None if it did not."""
        self._proof = TileProof(action.dim)
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
            objection = self._proof.refuse(unit.module)
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
        was_given = self._proof.is_given(unit.module)
        call = (args, kwargs)
        objection = self._proof.objection(unit, unit.module, unit.original, call)
        if objection is None:
            objection = self._proof.objection_at_length(
                unit,
                unit.module,
                unit.original,
                call,
                num_tiles=self.action.slices_of(sequence_length(*call, dim=self.action.dim)),
                may_be_partial=True,
            )
        if objection is None and not was_given:
            self.objection = None
            unit.tell("tile", "runs in slices: gradients of its weights are summed by slice")
        return objection

    def _say_why_whole(self, unit: Unit, objection: str) -> None:
        self.objection = objection
        words = words_of(objection)
        if words not in self._told:
            self._told.add(words)
            _log.warning("unit %r is recomputed whole and not in slices: %s.", unit.name, objection)
            unit.tell("tile", f"is recomputed whole and not in slices: {objection}")


def _on_contiguous(
    forward: Callable[..., Any], are_contiguous: tuple[bool, ...], *args: Any, **kwargs: Any
) -> Any:
    flags = iter(are_contiguous)

    def as_in_whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous() if next(flags) else tensor

    args, kwargs = map_leaves(as_in_whole, (args, kwargs))
    return forward(*args, **kwargs)
