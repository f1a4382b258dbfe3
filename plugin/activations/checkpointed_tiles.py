"""Runs a token-wise module in slices, each of them a checkpoint of its own.

Each slice saves its inputs only, by whatever saved-tensor hooks are in force; what happens inside
of it is computed again when backward comes to it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rematic.activations import torch_private
from rematic.activations.nested import Nested, iter_leaves, map_leaves
from rematic.activations.replay import announced_as_replay
from rematic.activations.tile import Call, join_tiles, sequence_length, tile_calls
from rematic.memory import is_out_of_memory

Context = contextlib.AbstractContextManager[object]
_NUM_POSITIONS = 6
"""Positions on which it is tried."""


def run_in_checkpointed_tiles(
    forward: Callable[..., Nested],
    call: Call,
    *,
    num_tiles: int,
    dim: int,
    again: Callable[[], Context],
) -> Nested:
    """Returns what a call returns, computed in slices along `dim`.

    Args:
        forward: What to call; it must be token-wise, draw no random numbers and have no effects.
        call: Its arguments.
        num_tiles: Number of slices; fewer if the sequence is shorter.
        dim: The dimension of the sequence.
        again: Returns what is entered around a slice that is computed again.
    """
    contiguous = tuple(tensor.is_contiguous() for tensor in iter_leaves(call))
    outputs, lengths = [], []
    for tile in tile_calls(*call, num_tiles=num_tiles, dim=dim, copies=False):
        lengths.append(sequence_length(*tile, dim=dim))
        outputs.append(_checkpointed(forward, tile, contiguous, again))
    return join_tiles(outputs, lengths, dim=dim)


def is_worth_tiles(
    module: nn.Module, forward: Callable[..., Nested], call: Call, *, dim: int
) -> bool:
    """Returns whether slices of a call save memory, tried on its first positions.

    They do if what the module saves inside, beside parameters, inputs and outputs, is as large as
    its input; not if its backward fails in a checkpoint (some read what they saved twice).

    Args:
        module: The module, which must be token-wise.
        forward: Its forward.
        call: Arguments of a call.
        dim: The dimension of the sequence.
    """

    def tiny(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.detach()
        if part.ndim:
            part = part.narrow(dim, 0, min(part.shape[dim], _NUM_POSITIONS)).clone()
        return part.requires_grad_(part.is_floating_point())

    few: Call = map_leaves(tiny, call)
    inputs, saved = list(iter_leaves(few)), _Saved()
    try:
        with announced_as_replay(), torch.enable_grad():
            with saved_tensors_hooks(saved.pack, saved.unpack):
                outputs = list(iter_leaves(forward(*few[0], **few[1])))
            outside = [*inputs, *outputs, *module.parameters(), *module.buffers()]
            if saved.bytes_beside(outside) < _bytes_of_floating(inputs):
                return False
            del outputs
            contiguous = tuple(tensor.is_contiguous() for tensor in inputs)
            with hooks_of_its_own():
                tile = _checkpointed(forward, few, contiguous, contextlib.nullcontext)
                ends = [tensor for tensor in iter_leaves(tile) if tensor.requires_grad]
                sources = [tensor for tensor in inputs if tensor.requires_grad]
                if ends and sources:
                    gradients = [torch.ones_like(tensor) for tensor in ends]
                    torch.autograd.grad(ends, sources, gradients, allow_unused=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def hooks_of_its_own() -> saved_tensors_hooks:
    """Returns hooks under which what is saved is no matter of the hooks around."""
    return saved_tensors_hooks(_detached, _as_packed)


def _checkpointed(
    forward: Callable[..., Nested],
    call: Call,
    contiguous: tuple[bool, ...],
    again: Callable[[], Context],
) -> Nested:
    positions = iter(range(len(contiguous)))
    places = map_leaves(lambda _: _Place(next(positions)), call)
    return checkpoint(
        functools.partial(_with_tensors, forward, places, contiguous),
        *iter_leaves(call),
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (contextlib.nullcontext(), _Anew(again)),
    )


class _Place:
    """Stands for a tensor in the arguments of a call."""

    def __init__(self, position: int) -> None:
        self.position = position


def _with_tensors(
    forward: Callable[..., Nested],
    places: Nested,
    contiguous: tuple[bool, ...],
    *tensors: torch.Tensor,
) -> Nested:
    """Runs one slice; of contiguous tensors, whose slices may not be, it is given contiguous ones.

    (They are made inside of it, so that it saves views of the whole and no copies.)
    """

    def tensor_at(place: _Place) -> torch.Tensor:
        tensor = tensors[place.position]
        return tensor.contiguous() if contiguous[place.position] else tensor

    args, kwargs = map_leaves(tensor_at, places, leaf=_Place)
    return forward(*args, **kwargs)


class _Anew(contextlib.AbstractContextManager[None]):
    """Enters another context each time: a graph that is kept is computed again and again."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self._make = make
        self._entered: list[Context] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


class _Saved:
    """Counts what a call saves for backward."""

    def __init__(self) -> None:
        self._storages: dict[int | None, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._storages[torch_private.storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return _detached(tensor)

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def bytes_beside(self, tensors: list[torch.Tensor]) -> int:
        known = {torch_private.storage_key(tensor) for tensor in tensors}
        return sum(nbytes for key, nbytes in self._storages.items() if key not in known)


def _bytes_of_floating(tensors: list[torch.Tensor]) -> int:
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return sum(tensor.numel() * tensor.element_size() for tensor in floating)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # an output of the call would hold its own graph, and with it this holder
    return tensor.detach() if tensor.requires_grad else tensor


def _as_packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
