"""Copies between a device and host memory, on CUDA beside the computation.

The ordering is written against the few calls of `StreamApi`, so that it can be tested on a device
that is only simulated. Not run on a GPU yet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Returns whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Waits until it is."""
        ...


class Stream(Protocol):
    """A queue of work on the device."""

    def wait_event(self, event: Event) -> None:
        """Lets what is queued later wait for the event."""
        ...

    def record_event(self) -> Event:
        """Returns an event after what is queued so far."""
        ...


StreamT = TypeVar("StreamT", bound=Stream)


class StreamApi(Protocol[StreamT]):
    """What the copies ask of a device that has streams."""

    def new_stream(self) -> StreamT:
        """Returns a stream of its own."""
        ...

    def current_stream(self) -> StreamT:
        """Returns the stream on which this thread computes."""
        ...

    def use(self, stream: StreamT) -> AbstractContextManager[object]:
        """Makes a stream the current one inside `with`."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Returns host memory that the device can copy from and to by itself."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy on the current stream."""
        ...

    def keep_for(self, tensor: torch.Tensor, stream: StreamT) -> None:
        """Keeps the tensor's memory from being reused before the stream's queued work is done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A flat byte tensor that is being filled."""

    tensor: torch.Tensor
    """Where the bytes will be."""
    done: Event | None
    """When they are there, None for now."""


class Copies(Protocol):
    """Copies for one device."""

    def to_host(self, source: torch.Tensor) -> Copy:
        """Begins to copy flat bytes to the host; the caller may let go of them at once."""
        ...

    def to_device(self, host: Copy, device: torch.device) -> Copy:
        """Begins to copy bytes back."""
        ...

    def wait(self, done: Event | None) -> None:
        """Lets what this thread computes next on the device wait for a copy."""
        ...


class StreamCopies(Generic[StreamT]):
    """Copies on two streams of their own, one for each direction."""

    def __init__(self, api: StreamApi[StreamT]) -> None:
        self._api = api
        self._out = api.new_stream()
        self._back = api.new_stream()

    def to_host(self, source: torch.Tensor) -> Copy:
        """Copies when the bytes have been computed; they stay allocated until they are copied."""
        host = self._api.pinned(source.numel())
        self._out.wait_event(self._api.current_stream().record_event())
        with self._api.use(self._out):
            self._api.copy(host, source)
        self._api.keep_for(source, self._out)
        return Copy(tensor=host, done=self._out.record_event())

    def to_device(self, host: Copy, device: torch.device) -> Copy:
        """Copies when the bytes are on the host and the new memory is no longer used by others."""
        target = torch.empty(host.tensor.numel(), dtype=torch.uint8, device=device)
        # The allocator gives out memory that the current stream may still be reading.
        self._back.wait_event(self._api.current_stream().record_event())
        if host.done is not None:
            self._back.wait_event(host.done)
        with self._api.use(self._back):
            self._api.copy(target, host.tensor)
        # A prefetched tensor may be dropped unread.
        self._api.keep_for(target, self._back)
        return Copy(tensor=target, done=self._back.record_event())

    def wait(self, done: Event | None) -> None:
        """Orders the current stream after the copy; the host does not wait."""
        if done is not None:
            self._api.current_stream().wait_event(done)


class PlainCopies:
    """Copies that are done when the call returns, for devices without streams."""

    def to_host(self, source: torch.Tensor) -> Copy:
        """Copies to pageable memory."""
        return Copy(tensor=source.to("cpu", copy=True), done=None)

    def to_device(self, host: Copy, device: torch.device) -> Copy:
        """Copies back."""
        return Copy(tensor=host.tensor.to(device, copy=True), done=None)

    def wait(self, done: Event | None) -> None:
        """Does nothing: there is nothing to wait for."""


class CudaApi:
    """`StreamApi` by `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.cuda.Stream:
        """Returns a stream of the device."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # untyped in torch

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the stream on which this thread computes."""
        return torch.cuda.current_stream(self._device)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Makes a stream the current one."""
        return torch.cuda.stream(stream)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Returns page-locked memory, which torch rounds up to a power of two and keeps."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy."""
        target.copy_(source, non_blocking=True)

    def keep_for(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Tells the allocator about the stream."""
        tensor.record_stream(stream)


def copies_for(device: torch.device) -> Copies | None:
    """Returns the copies for a device, None for the CPU, whose memory is the host's already."""
    if device.type == "cpu":
        return None
    # Any: the stubs of torch 2.13 leave the methods of its streams untyped
    return StreamCopies[Any](CudaApi(device)) if device.type == "cuda" else PlainCopies()
