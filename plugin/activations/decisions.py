"""One decision of a router: what it returned, and the slots of what it saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rematic.activations import torch_private
from rematic.activations.ambient import (
    AmbientState,
    capture_ambient,
    generators_moved,
    restore_generators,
)
from rematic.activations.nested import iter_leaves, map_leaves
from rematic.activations.record import Holder, Record
from rematic.activations.replay import save_again, skip_slot


class RouterCall:
    """A call that decides.

    Args:
        forward: What is called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        limit: Tensors with fewer elements are decisions, in what it returns and in what it saves;
            others are computed again, since they take as much memory as activations. None: all are.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        limit: int | None,
    ) -> None:
        self._forward = forward
        self._call = (args, dict(kwargs))
        self._limit = limit

    def run(self) -> Any:
        """Runs it."""
        args, kwargs = self._call
        return self._forward(*args, **kwargs)

    def inputs(self) -> list[torch.Tensor]:
        """Returns the tensors it is given."""
        return list(iter_leaves(self._call))

    def is_decision(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is kept as it is."""
        return self._limit is None or tensor.numel() < self._limit


@dataclass(frozen=True, slots=True)
class _ViewOfInput:
    """A slot that holds an input of the router, or a view of it: the replay makes it again."""

    position: int
    input_shape: torch.Size
    input_stride: tuple[int, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def made_of(self, tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.storage_offset() + self.offset
        return tensor.detach().as_strided(self.shape, self.stride, start)

    def fits(self, inputs: list[torch.Tensor]) -> bool:
        given = inputs[self.position] if self.position < len(inputs) else None
        layout = (self.input_shape, self.input_stride)
        return given is not None and (given.shape, given.stride()) == layout


class SlotsOfCall:
    """What one call of a router saved in forward: its pack hook."""

    def __init__(self, record: Record, call: RouterCall) -> None:
        self.slots: list[_ViewOfInput | None] | None = []
        """None in it for a slot that is never empty; None for it if the router must run again."""
        self.call = call
        self._record = weakref.ref(record)
        self._inputs = {
            torch_private.storage_key(tensor): (position, tensor)
            for position, tensor in enumerate(call.inputs())
        }
        self.generators: AmbientState | None = None
        """Where the generators stood afterwards, None if they had not moved."""
        self._devices = tuple(device for device, _ in record.ambient.device_generators)
        self._own = tuple(generator for generator, _ in record.ambient.own_generators)
        self._before = capture_ambient(self._devices, self._own)

    def pack(self, tensor: torch.Tensor) -> Holder:
        """Takes one saved tensor; what is small is never let go."""
        record = self._record()
        assert record is not None, "its forward runs"
        holder = record.pack(tensor)
        view = self._as_view(tensor)
        if not holder.external and view is None:
            if self.call.is_decision(tensor):
                holder.tensor = tensor.detach() if tensor.requires_grad else tensor
                holder.external = True  # as if it came from outside: not let go, not moved
            else:
                self.slots = None
        if self.slots is not None:
            self.slots.append(None if holder.external else view)
        return holder

    def close(self) -> None:
        """Lets go of the inputs, and takes note of random numbers that were drawn."""
        self._inputs.clear()
        if generators_moved(self._before):
            self.generators = capture_ambient(self._devices, self._own)

    def _as_view(self, tensor: torch.Tensor) -> _ViewOfInput | None:
        found = self._inputs.get(torch_private.storage_key(tensor))
        if found is None or tensor.dtype != found[1].dtype:
            return None
        position, given = found
        return _ViewOfInput(
            position,
            given.shape,
            given.stride(),
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()) - int(given.storage_offset()),
        )


class Decision:
    """What one call of a router decided."""

    def __init__(self, result: Any, slots: SlotsOfCall) -> None:
        slots.close()
        self._slots = slots.slots
        self._generators = slots.generators
        self._result = map_leaves(lambda tensor: _Value(tensor, slots.call), result)
        if any(value.kept is None for value in iter_leaves(self._result, leaf=_Value)):
            self._slots = None  # part of the result must be computed

    def result(self, *, instead_of: Any = None) -> Any:
        """Returns the decision as new tensors.

        Args:
            instead_of: What a second run returned, for what is not kept.
        """
        if instead_of is None:
            return map_leaves(_Value.made_again, self._result, leaf=_Value)
        values = iter_leaves(self._result, leaf=_Value)

        def decided(tensor: torch.Tensor) -> torch.Tensor:
            value = next(values, None)
            return tensor if value is None or value.kept is None else value.made_again()

        return map_leaves(decided, instead_of)

    def take_slots(self, call: RouterCall) -> bool:
        """Takes the slots of the router in the replay that runs, and leaves the router out.

        Returns:
            False, with no slot taken, if the router must run.
        """
        inputs = call.inputs()
        views = [slot for slot in self._slots or () if slot is not None]
        if self._slots is None or not all(view.fits(inputs) for view in views):
            return False
        for slot in self._slots:
            if slot is None:
                skip_slot()
            else:
                save_again(slot.made_of(inputs[slot.position]))
        if self._generators is not None:
            restore_generators(self._generators)
        return True


class _Value:
    """One tensor that a router returned."""

    __slots__ = ("kept", "requires_grad")

    def __init__(self, tensor: torch.Tensor, call: RouterCall) -> None:
        # a copy: some models scale the weights of the experts in place
        self.kept = tensor.detach().clone() if call.is_decision(tensor) else None
        self.requires_grad = tensor.requires_grad

    def made_again(self) -> torch.Tensor:
        assert self.kept is not None, "only a router that runs again leaves a part out"
        if not self.requires_grad:
            return self.kept.clone()
        return self.kept.detach().requires_grad_().clone()  # no leaf: it may be changed in place
