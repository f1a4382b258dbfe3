"""Compares slices of a call with the whole of it, at the length that it has.

A few positions do not show what looks further than they reach: a dilated convolution, a window, a
capacity, a branch on the length.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from rematic.activations.ambient import AmbientState, applied, capture_ambient, generators_moved
from rematic.activations.kept_values import version_of
from rematic.activations.module_state import ModuleState
from rematic.activations.nested import Nested, iter_leaves, map_leaves
from rematic.activations.tile import Call, sequence_length, tile_calls
from rematic.activations.tile_effects import EffectsOfCall, differing_rest
from rematic.activations.token_wise import (
    OTHER_GRADIENTS,
    Objection,
    have_same_gradients,
    is_close,
    without_zeros,
)
from rematic.memory import is_out_of_memory

_FAR = "slices of the whole sequence give other values: it depends on the length, or looks far away"


def objection_at_length(
    module: nn.Module,
    forward: Callable[..., Nested],
    call: Call,
    *,
    num_tiles: int,
    dim: int,
    may_be_partial: bool,
) -> Objection | None:
    """Says why slices of a call do not give what the whole of it gives, None if they do.

    Both run without gradients, on copies of the inputs, so it takes what forward takes inside; two
    slices run with gradients too, whose backward is compared.
    Nothing is left behind: generators, buffers and attributes are as before.

    Args:
        module: The module, in the mode in which it will run.
        forward: Its forward.
        call: Arguments of the call.
        num_tiles: Number of slices.
        dim: The dimension of the sequence.
        may_be_partial: Whether two slices at a time are enough, and one sequence of the batch as
            far as there is room for it, where the memory for the whole call is not there.

    Raises:
        RuntimeError: If memory runs out all the same.
    """
    comparison = _Comparison(module, forward, call, num_tiles=num_tiles, dim=dim)
    try:
        found, is_answered = comparison.of_values(call), True
    except RuntimeError as error:
        if not is_out_of_memory(error) or not may_be_partial:
            raise
        is_answered = False
    if not is_answered:  # outside of `except`: what failed is freed
        found = comparison.of_some_values()
    if found is not None:
        return found
    return _if_it_fits(comparison.of_gradients) if may_be_partial else comparison.of_gradients()


class _Comparison:
    """One call beside its slices, in the state in which the call finds its module."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Nested],
        call: Call,
        *,
        num_tiles: int,
        dim: int,
    ) -> None:
        self._forward = forward
        self._call = call
        self._dim = dim
        self._size = max(1, -(-sequence_length(*call, dim=dim) // num_tiles))
        self._state = state = ModuleState(module, None)
        tensors = [*iter_leaves(call), *state.tensors()]
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        generators = (*state.generators, *iter_leaves(call, leaf=torch.Generator))
        self._ambient = capture_ambient(tuple(sorted(devices, key=str)), generators)

    def of_values(self, call: Call) -> Objection | None:
        """Compares the values of the call, or of a part of it."""
        with self._as_found(), torch.no_grad():
            # under no_grad the cache would keep weights without their graph
            torch.set_autocast_cache_enabled(False)
            return _answer(self._forward, call, self._size, self._dim, self._state, self._ambient)

    def of_some_values(self) -> Objection | None:
        """Compares two slices at a time, and one sequence as far as there is room for it."""
        pairs = _pairs_of_slices(self._call, self._size, self._dim)
        found = next(filter(None, map(self.of_values, pairs)), None)
        return found or _if_it_fits(lambda: self.of_values(_first_sequence(self._call, self._dim)))

    def of_gradients(self) -> Objection | None:
        """Compares the backward of the first two slices."""
        pair = next(_pairs_of_slices(self._call, self._size, self._dim))
        with self._as_found(), torch.enable_grad():
            return _objection_of_gradients(self._forward, pair, self._dim)

    @contextlib.contextmanager
    def _as_found(self) -> Iterator[None]:
        state = self._state
        with applied(self._ambient), state.replayed(), without_zeros(state):
            yield


def _if_it_fits(answer: Callable[[], Objection | None]) -> Objection | None:
    try:
        return answer()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _answer(
    forward: Callable[..., Nested],
    call: Call,
    size: int,
    dim: int,
    state: ModuleState,
    ambient: AmbientState,
) -> Objection | None:
    try:
        found = next(_differences(forward, call, size, dim, state), None)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return Objection(text=f"it fails on slices of the whole sequence: {error}")
    if generators_moved(ambient):
        return Objection(text="it draws random numbers, and slices would draw others")
    return found


def _objection_of_gradients(
    forward: Callable[..., Nested], call: Call, dim: int
) -> Objection | None:
    try:
        same = have_same_gradients(forward, call, num_tiles=2, dim=dim)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return Objection(text=f"its backward fails on slices of the whole sequence: {error}")
    return None if same else Objection(text=OTHER_GRADIENTS)


def _differences(
    forward: Callable[..., Nested], call: Call, size: int, dim: int, state: ModuleState
) -> Iterator[Objection]:
    copied: Call = map_leaves(lambda tensor: tensor.detach().clone(), call)
    versions = [version_of(tensor) for tensor in iter_leaves(copied)]
    effects = EffectsOfCall(state)
    output = forward(*copied[0], **copied[1])
    whole = list(iter_leaves(output))
    if [version_of(tensor) for tensor in iter_leaves(copied)] != versions:
        yield Objection(text="it changes its input in place")
    length = sequence_length(*copied, dim=dim)
    if any(not tensor.ndim or tensor.shape[dim] != length for tensor in whole):
        yield Objection(text="its output does not have the length of its input")
    largest = [_largest(tensor) for tensor in whole]
    if not all(map(math.isfinite, largest)):
        yield Objection(text="what it returns for the whole sequence is not finite", is_final=False)
    for i, tile in enumerate(tile_calls(*copied, num_tiles=-(-length // size), dim=dim)):
        sliced = forward(*tile[0], **tile[1])
        start, tiled = i * size, list(iter_leaves(sliced))
        pieces = [t.narrow(dim, start, min(size, length - start)) for t in whole]
        if [(t.shape, t.dtype) for t in tiled] != [(t.shape, t.dtype) for t in pieces]:
            yield Objection(
                text="slices of the whole sequence give outputs of another shape or type"
            )
        if not all(map(is_close, tiled, pieces, largest)):
            yield Objection(text=_FAR)
        if differing_rest(output, sliced):
            yield Objection(
                text="it returns something that is no tensor, and other for a slice than for all"
            )
    changed = effects.change()
    if changed is not None:
        yield Objection(text=f"its forward changes {changed}")


def _largest(tensor: torch.Tensor) -> float:
    """Returns the largest absolute value, without a copy of the tensor."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return max(abs(float(bound)) for bound in torch.aminmax(tensor))


def _pairs_of_slices(call: Call, size: int, dim: int) -> Iterator[Call]:
    """Yields the first two and the last two slices of a call, as one stretch each."""
    length = sequence_length(*call, dim=dim)
    taken = min(2 * size, length)
    for start in dict.fromkeys((0, length - taken)):
        yield _narrowed(call, dim, start, taken)


def _first_sequence(call: Call, dim: int) -> Call:
    """Returns a call with the first sequence of the batch alone."""

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:1] if tensor.ndim > 1 and dim % tensor.ndim else tensor

    return map_leaves(first, call)


def _narrowed(call: Call, dim: int, start: int, length: int) -> Call:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        piece = tensor.narrow(dim, start, length)
        return piece.contiguous() if tensor.is_contiguous() else piece

    return map_leaves(cut, call)
