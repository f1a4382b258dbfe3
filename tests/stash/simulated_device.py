"""A device with streams that exists only as queues of Python functions.

Nothing queued runs before somebody synchronises, so a missing wait shows: what should have been
copied is not there yet. Host and device memory are filled with noise when they are handed out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

NOISE = 0xEE


class SimulatedEvent:
    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream
        self._count = stream.num_queued

    def query(self) -> bool:
        return self._stream.num_done >= self._count

    def synchronize(self) -> None:
        self._stream.device.num_waits += not self.query()
        self._stream.run_until(self._count)

    def reach(self) -> None:
        self._stream.run_until(self._count)


class SimulatedStream:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.num_done = 0
        self._queue: list[Callable[[], object]] = []

    @property
    def num_queued(self) -> int:
        return self.num_done + len(self._queue)

    def enqueue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def wait_event(self, event: SimulatedEvent) -> None:
        if not self.device.deaf:
            self.enqueue(event.reach)

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def run_until(self, count: int) -> None:
        while self.num_done < count:
            work = self._queue.pop(0)
            self.num_done += 1
            work()

    def synchronize(self) -> None:
        self.run_until(self.num_queued)


class SimulatedDevice:
    """`StreamApi` of one device.

    Args:
        deaf: Whether streams ignore the events that they are told to wait for: a broken device,
            by which the tests show that they would notice.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.num_waits = 0
        """How often the host waited for work that was not done."""
        self.compute = SimulatedStream(self)
        self.streams: list[SimulatedStream] = []
        self.kept: list[tuple[int, SimulatedStream]] = []
        """Addresses of the memory that must not be reused before a stream is done."""
        self.num_copies = 0
        self._current = self.compute

    def new_stream(self) -> SimulatedStream:
        self.streams.append(SimulatedStream(self))
        return self.streams[-1]

    def current_stream(self) -> SimulatedStream:
        return self._current

    @contextlib.contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        self._current, former = stream, self._current
        yield
        self._current = former

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), NOISE, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.fill_(NOISE)
        self.num_copies += 1
        self._current.enqueue(lambda: target.copy_(source))

    def keep_for(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        self.kept.append((tensor.data_ptr(), stream))

    def compute_into(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Queues a kernel that writes."""
        self.compute.enqueue(lambda: target.copy_(values))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queues a kernel that reads, and waits for that stream alone."""
        result: list[torch.Tensor] = []
        self.compute.enqueue(lambda: result.append(tensor.clone()))
        self.compute.synchronize()
        return result[0]
