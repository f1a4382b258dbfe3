"""Keeps the decisions of routers, so that a replay sends every token where forward sent it.

Near-ties, kernels that add up in no fixed order, and noise of its own can make a router decide
otherwise when it runs again; buffers then have another size, or, worse, the same. So replays get
what the routers returned in forward, and what routers saved of their own is never let go. The same
holds for a top-k that a block computes outside of its router.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from rematic.activations.decisions import Decision, RouterCall, SlotsOfCall
from rematic.activations.instance_forward import InstanceForward
from rematic.activations.nested import iter_leaves
from rematic.activations.record import Holder, Record
from rematic.activations.replay import ReplayError, counts_ops

_state = threading.local()
_CHOICES = frozenset(
    {
        *(torch.topk, torch.Tensor.topk, torch.sort, torch.Tensor.sort),
        *(torch.argsort, torch.Tensor.argsort, torch.argmax, torch.Tensor.argmax),
    }
)


class Routing:
    """The routers of one unit, and what is known of them."""

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self.chooses_outside: bool | None = None
        """Whether a top-k runs outside of the routers, None until a forward has shown it."""
        self.may_skip = True
        """Whether replays leave routers out where nothing but their results is needed."""
        self._forwards = [InstanceForward(router, _around_router) for router in routers]

    def modules(self) -> set[nn.Module]:
        """Returns the routers and what is inside of them."""
        routers = [forward.known_module() for forward in self._forwards]
        return {part for router in routers if router is not None for part in router.modules()}

    def remove(self) -> None:
        """Gives every router its own `forward` back."""
        for forward in reversed(self._forwards):
            forward.remove()


class RoutedBody:
    """What a record of a unit with routers runs: forward takes decisions down, replays keep them.

    Made for one record and called by it alone.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        routing: Routing,
        unpack: Callable[[Holder], torch.Tensor],
    ) -> None:
        self._forward = forward
        self._routing = routing
        self._unpack = unpack
        self._record: weakref.ref[Record] | None = None
        self._decisions: list[Decision] = []
        self._is_recorded = False
        self._position = 0

    def belong_to(self, record: Record) -> None:
        """Takes note of the record whose body it is, which it does not keep alive."""
        self._record = weakref.ref(record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the unit's forward."""
        self._position = 0
        watches = self._routing.chooses_outside is not False
        mode = _Choices(self) if watches else contextlib.nullcontext()
        with _active(self), mode:
            output = self._forward(*args, **kwargs)
        self._is_recorded = True
        if self._routing.chooses_outside is None:
            self._routing.chooses_outside = isinstance(mode, _Choices) and mode.num_choices > 0
        return output

    def decide(self, call: RouterCall) -> Any:
        """Runs what decides, or not; returns what it returned in forward."""
        if not self._is_recorded:
            return self._take_down(call)
        decision = self._next_decision()
        if self._routing.may_skip and not counts_ops() and decision.take_slots(call):
            return decision.result()
        return decision.result(instead_of=call.run())

    def _take_down(self, call: RouterCall) -> Any:
        record = None if self._record is None else self._record()
        assert record is not None, "it runs its body"
        slots = SlotsOfCall(record, call)
        with saved_tensors_hooks(slots.pack, self._unpack):
            result = call.run()
        self._decisions.append(Decision(result, slots))
        return result

    def _next_decision(self) -> Decision:
        if self._position >= len(self._decisions):
            raise ReplayError(
                "the replay of a unit asks its router more often than its forward did: expected "
                f"{len(self._decisions)} decisions. Keep this unit with a rule whose action is "
                "`keep`."
            )
        self._position += 1
        return self._decisions[self._position - 1]


class _Choices(TorchFunctionMode):
    """Sees each top-k that runs outside of the routers."""

    def __init__(self, body: RoutedBody) -> None:
        super().__init__()
        self.num_choices = 0
        self._body = body

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _CHOICES or _current() is None:
            return func(*args, **(kwargs or {}))
        self.num_choices += 1
        with _active(None):
            return self._body.decide(RouterCall(func, args, kwargs or {}, limit=None))


def _around_router(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    body = _current()
    if body is None or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    limit = max((tensor.numel() for tensor in iter_leaves((args, kwargs))), default=0)
    with _active(None):
        return body.decide(RouterCall(forward, args, kwargs, limit=limit))


def _current() -> RoutedBody | None:
    return getattr(_state, "body", None)


@contextlib.contextmanager
def _active(body: RoutedBody | None) -> Iterator[None]:
    before = _current()
    _state.body = body
    try:
        yield
    finally:
        _state.body = before
