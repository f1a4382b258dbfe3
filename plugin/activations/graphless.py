"""Records without a graph, for units whose graph keeps more than it saves.

Forward runs as ever, but its graph is thrown away, and with it whatever autograd functions have put
aside. One node takes its place: in backward it runs the forward again with a graph and
differentiates that. Parameters are shown to it as aliases, because hooks on the real ones (DDP's)
must see one gradient for the node and not one more for the graph inside it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from rematic.activations.ledger import Ledger
from rematic.activations.nested import iter_leaves, map_leaves
from rematic.activations.record import Record
from rematic.activations.replay import as_in_forward, refuse_changed_inputs

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
GRAPH_IS_SHARED = (
    "its graph is kept from the next call on, hidden tensors too: a tensor from inside is held "
    "outside (a key/value cache? a hook that collects?). Gradients of this call are right, but "
    "summed in another order"
)
"""What the log says when others hold a part of a graph that was to be thrown away."""
_unpacked = threading.local()


class Parted:
    """What a forward returned, taken off its graph: containers, and tensors without history."""

    def __init__(self, output: Any) -> None:
        tensors = list({id(tensor): tensor for tensor in iter_leaves(output)}.values())
        order = {id(tensor): position for position, tensor in enumerate(tensors)}
        self.places = map_leaves(lambda tensor: _Place(order[id(tensor)]), output)
        self.need_gradients = [tensor.requires_grad for tensor in tensors]
        self.tensors = [tensor.detach() for tensor in tensors]

    def filled(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Returns the containers with other tensors in them."""
        return map_leaves(lambda place: tensors[place.position], self.places, leaf=_Place)


class _Place:
    """Stands for a tensor in the containers that held it."""

    def __init__(self, position: int) -> None:
        self.position = position


def joined(record: Record, parted: Parted, call: Call, ledger: Ledger) -> Any:
    """Returns the output of a record's forward with one node for a graph.

    Args:
        record: The record; autograd comes to own it.
        parted: The output. Its graph is gone by now, but for a part that somebody else holds:
            through that part gradients flow as ever.
        call: The arguments, with the graphs they come from.
        ledger: Counts the replay and makes room for it.
    """
    given = _unique(iter_leaves(call), record)
    parameters = _trainable(record)
    if not any(parted.need_gradients):
        return parted.filled(tuple(parted.tensors))
    replay = _GraphlessReplay(record, parted.need_gradients, ledger)
    with saved_tensors_hooks(lambda _: replay, _hand_over):
        outputs = _Node.apply(parted, *given, *parameters)  # type: ignore[no-untyped-call]
    return parted.filled(outputs)


class _Node(torch.autograd.Function):
    """Stands for the graph of a unit.

    It owns the replay through a saved tensor, so that it is given up when backward has passed, as
    saved tensors are.
    """

    @staticmethod
    def forward(ctx: Any, parted: Parted, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))
        outputs, parted.tensors = tuple(parted.tensors), []
        pairs = zip(outputs, parted.need_gradients, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, needed in pairs if not needed))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # unpacks, which hands over the replay
        replay: _GraphlessReplay = _unpacked.replay
        _unpacked.replay = None
        return (None, *replay.gradients(gradients, ctx.needs_input_grad[1:]))


def _hand_over(replay: _GraphlessReplay) -> torch.Tensor:
    _unpacked.replay = replay
    return torch.empty(0)


class _GraphlessReplay:
    """Runs the forward of a record again, with a graph, and differentiates it."""

    def __init__(self, record: Record, need_gradients: list[bool], ledger: Ledger) -> None:
        self._record = record
        self._need_gradients = need_gradients
        self._ledger = ledger

    def gradients(
        self, given: tuple[torch.Tensor | None, ...], needed: tuple[bool, ...]
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of inputs and parameters, None for those not needed.

        Args:
            given: The gradient of each output, None where it has none.
            needed: For each input and parameter, whether its gradient is asked for.
        """
        with self._record.lock:
            self._ledger.begin_replay(self._record)
            while True:
                try:
                    return self._once(given, needed)
                except RuntimeError as error:
                    wanted = self._ledger.wanted_after(error)
                    if wanted is None:
                        raise
                # outside `except`, so that the failed replay is freed before the next one
                self._ledger.evict(wanted, spare_active=True)

    def _once(
        self, given: tuple[torch.Tensor | None, ...], needed: tuple[bool, ...]
    ) -> list[torch.Tensor | None]:
        record = self._record
        refuse_changed_inputs(record)
        record.num_replays += 1
        with as_in_forward(record, cached=False) as (args, kwargs), _aliased(record) as aliases:
            output = record.forward(*args, **kwargs)
        leaves = [*_unique(iter_leaves((args, kwargs)), record), *aliases]
        outputs = list({id(tensor): tensor for tensor in iter_leaves(output)}.values())
        pairs = zip(outputs, given, self._need_gradients, strict=True)
        ends = [(t, g) for t, g, has in pairs if has and g is not None and t.requires_grad]
        sources = [leaf for leaf, is_needed in zip(leaves, needed, strict=True) if is_needed]
        found = iter(
            torch.autograd.grad(
                [tensor for tensor, _ in ends],
                sources,
                [gradient for _, gradient in ends],
                allow_unused=True,
            )
        )
        return [next(found) if is_needed else None for is_needed in needed]


def _unique(tensors: Iterator[torch.Tensor], record: Record) -> list[torch.Tensor]:
    """Returns, of the tensors of a call, each that needs a gradient once, in order."""
    pairs = zip(tensors, record.arguments.tensors(), strict=True)
    return list({id(arg): tensor for tensor, arg in pairs if arg.requires_grad}.values())


def _trainable(record: Record) -> list[torch.Tensor]:
    states = record.module_state.parameters
    return list({id(s.tensor): s.tensor for s in states if s.requires_grad}.values())


@contextlib.contextmanager
def _aliased(record: Record) -> Iterator[list[torch.Tensor]]:
    """Puts an alias in the place of each trainable parameter; yields them, in their order."""
    states = [state for state in record.module_state.parameters if state.requires_grad]
    aliases = {id(tensor): nn.Parameter(tensor.detach()) for tensor in _trainable(record)}
    present = [state.home.get(state.name) for state in states]
    try:
        for state in states:
            state.home[state.name] = aliases[id(state.tensor)]
        yield list(aliases.values())
    finally:
        for state, parameter in zip(states, present, strict=True):
            state.home[state.name] = parameter
