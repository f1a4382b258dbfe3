"""Live bytes after every op of a step, interval by interval."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.memory.storages import storages_of

# Its output is its input, which was made out of sight of dispatch modes (`torch.tensor`).
_LIFTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default})


@dataclass(kw_only=True)
class Interval:
    """A stretch of a step: what was live when it began, after each op, and when it ended."""

    name: str
    """`embedding`, `forward 0`, `head`, `backward 0`, `embedding backward`."""

    start_bytes: int
    """Live bytes when it began."""

    end_bytes: int = 0
    """Live bytes when it ended."""

    ops: list[str] = field(default_factory=list)
    """Qualified names of the ops."""

    live_bytes: list[int] = field(default_factory=list)
    """Live bytes after each op."""


OpObserver = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Is shown each op: the op, what it was given, what it returned."""


class EventLog(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts live storages exactly, as the simulated probe does, and writes down every op.

    Entered above all other modes. Storages that exist before are named to `ignore` and count
    nothing: live bytes are those beyond what the step began with.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.live_bytes = 0
        """Current."""
        self.intervals: list[Interval] = []
        """Those that have ended, in order, and last the one that runs."""
        self.observer: OpObserver | None = None
        """Is shown each op, after it is counted."""
        self.on_death: Callable[[int, int], None] | None = None
        """Is told the key of each storage that dies, and its bytes."""
        self.is_muted = False
        """Whether bytes are counted but ops are not taken down."""
        self._next: str | None = None
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiles here, and torch's (2.13) guard against that costs as much as an op.
        return False

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes note of tensors that exist before the step."""
        for storage in storages_of(tuple(tensors)):
            self._note(storage, num_bytes=0)

    def cut(self, name: str) -> None:
        """Ends the interval that runs and begins another one."""
        self._next = None
        self.end()
        self.intervals.append(Interval(name=name, start_bytes=self.live_bytes))

    def cut_at_next_op(self, name: str) -> None:
        """Begins another interval right before the next op.

        Until then the caller of what has ended lets go of its arguments, which belongs to it.
        """
        self._next = name

    def end(self) -> None:
        """Ends the interval that runs."""
        if self.intervals:
            self.intervals[-1].end_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - whatever the dispatcher passes
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Runs one op and counts what it returns."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            # asked for half of all ops: answered here, in a tenth of the time
            return getattr(args[0], "fake_device", None) or func(*args, **kwargs)
        if self._next is not None:
            self.cut(self._next)
        output = func(*args, **kwargs)
        for storage in storages_of(output):
            if id(storage) not in self._references and (
                func in _LIFTS or not _is_given(storage, (args, kwargs))
            ):
                self._note(storage, num_bytes=storage.nbytes())
        if self.is_muted:
            return output
        if self.intervals:
            self.intervals[-1].ops.append(func._schema.name)
            self.intervals[-1].live_bytes.append(self.live_bytes)
        if self.observer is not None:
            self.observer(func, args, kwargs, output)
        return output

    def _note(self, storage: torch.UntypedStorage, *, num_bytes: int) -> None:
        key = id(storage)
        if key not in self._references:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = num_bytes
            self.live_bytes += num_bytes

    def _forget(self, key: int) -> None:
        del self._references[key]
        num_bytes = self._sizes.pop(key)
        self.live_bytes -= num_bytes
        if self.on_death is not None:
            self.on_death(key, num_bytes)


def _is_given(storage: torch.UntypedStorage, given: object) -> bool:
    return any(known is storage for known in storages_of(given))
