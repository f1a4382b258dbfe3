"""Eight bits per element instead of 16 or 32: lossy, for those who ask for it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rematic.memory.storages import LiveStorages
from rematic.quiet_import import import_quietly
from rematic.stash.handle import StoredTensor, give_out, not_loaded
from rematic.stash.layout import Span, spans_of
from rematic.stash.stash import MIN_BYTES, Handle

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK_SIZE = 256
_CHUNK_ELEMENTS = 2**20
"""How much is quantised at a time: what it needs for itself stays below 20 MiB."""


@dataclass(frozen=True, kw_only=True)
class QuantizationError:
    """How far tensors are from what they were before they were compressed."""

    relative_l2: float
    """Euclidean norm of the difference over that of the tensors, 0 for zeros."""
    relative_max: float
    """Largest difference of one element over the largest element, 0 for zeros."""
    max_abs: float
    """Largest difference of one element."""
    num_elements: int
    """Elements compared."""


def load_quantization() -> None:
    """Imports bitsandbytes and lets it make its code, which take some 30 MiB and a second.

    Left to the first tensor that is compressed, they would be taken where memory is short.

    Raises:
        ValueError: If bitsandbytes is not installed.
    """
    _Codec(_bitsandbytes(), _BLOCK_SIZE).encode(torch.ones(_BLOCK_SIZE), measured=True)


class CompressStash:
    """Keeps floating tensors on their device, quantised block-wise to 8 bits by bitsandbytes.

    Each block of consecutive elements has a scale and a non-uniform code (Dettmers et al. 2022,
    "8-bit Optimizers via Block-wise Quantization", section 2). What is not float32, float16 or
    bfloat16 stays with the caller, and so do tensors with infinite or undefined elements (masks),
    which would spoil their blocks.

    Args:
        block_size: Elements that share a scale: 64, 128, 256, 512, 1024, 2048 or 4096.
        min_bytes: Size of a storage from which it is taken.

    Raises:
        ValueError: If the block size is not one of these, or bitsandbytes is not installed.
    """

    name = "compress"
    lossy = True

    def __init__(self, *, block_size: int = _BLOCK_SIZE, min_bytes: int = MIN_BYTES) -> None:
        sizes = [2**power for power in range(6, 13)]
        if block_size not in sizes:
            raise ValueError(f"block_size is {block_size}: expected one of {sizes}")
        self.block_size = block_size
        """Elements that share a scale."""
        self.min_bytes = min_bytes
        """Size of a storage from which it is taken."""
        self._codec = _Codec(_bitsandbytes(), block_size)
        self._live = LiveStorages()

    @property
    def used_bytes(self) -> int:
        """Bytes of the codes and scales that living handles hold."""
        return self._live.num_bytes

    def put(
        self, tensors: Sequence[torch.Tensor], *, measured: bool = True
    ) -> list[StoredTensor | None]:
        """Quantises tensors (see `Stash.put`); raises what torch raises if memory runs out.

        Args:
            tensors: What to take.
            measured: Whether `quantization_error` can tell the error, which decodes all of it.
        """
        stored: list[tuple[Span, _Quantized]] = []
        for span in spans_of(tensors, min_bytes=self.min_bytes, by_dtype=True):
            dtype = span.views[0].dtype
            if dtype not in _DTYPES or span.num_bytes == 0:
                continue
            flat = _without_gaps(span, dtype)
            if bool(torch.isfinite(torch.stack(torch.aminmax(flat))).all()):
                block = self._codec.encode(flat, measured=measured)
                self._live.note(block.codes.untyped_storage())
                self._live.note(block.scales.untyped_storage())
                stored.append((span, block))
        return give_out(len(tensors), stored)

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Does nothing: the tensors are on their device."""

    def close(self) -> None:
        """Does nothing: what is held lives as long as its handles."""


def quantization_error(handles: Iterable[Handle | None]) -> QuantizationError:
    """Returns the error of all tensors among these handles that were compressed, taken together.

    Tensors that share a storage count once, those whose error was not measured do not count. For
    the handles of one `put` it is the error of that.
    """
    blocks = {
        id(handle.block): handle.block
        for handle in handles
        if isinstance(handle, StoredTensor) and isinstance(handle.block, _Quantized)
    }
    losses = [block.loss for block in blocks.values() if block.loss is not None]
    norm = math.fsum(loss.squared_norm for loss in losses)
    error = math.fsum(loss.squared_error for loss in losses)
    max_abs = max((loss.max_abs for loss in losses), default=0.0)
    largest = max((loss.largest for loss in losses), default=0.0)
    return QuantizationError(
        relative_l2=math.sqrt(error / norm) if norm > 0 else 0.0,
        relative_max=max_abs / largest if largest > 0 else 0.0,
        max_abs=max_abs,
        num_elements=sum(loss.num_elements for loss in losses),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    squared_norm: float
    squared_error: float
    max_abs: float
    largest: float
    num_elements: int


class _Codec:
    """Turns flat tensors into codes and scales, chunk by chunk, and back."""

    def __init__(self, functional: Any, block_size: int) -> None:  # noqa: ANN401 - an optional module
        self._functional = functional
        self._block_size = block_size

    def encode(self, flat: torch.Tensor, *, measured: bool) -> _Quantized:
        codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
        num_blocks = -(-flat.numel() // self._block_size)
        scales = torch.empty(num_blocks, dtype=torch.float32, device=flat.device)
        figures = []
        for kept, blocks in self._chunks(flat.numel()):
            chunk = flat[kept]
            codes[kept], state = self._functional.quantize_blockwise(
                chunk, blocksize=self._block_size
            )
            scales[blocks] = state.absmax
            if measured:
                # Compared in the dtype of the tensor, as it will come back.
                again = self._decode_chunk(codes[kept], scales[blocks]).to(flat.dtype)
                figures.append(_figures(chunk.float(), again.float()))
        loss = _loss(figures, flat.numel()) if measured else None
        return _Quantized(self, codes, scales, dtype=flat.dtype, loss=loss)

    def decode(self, block: _Quantized) -> torch.Tensor:
        flat = torch.empty(block.codes.numel(), dtype=block.dtype, device=block.codes.device)
        for kept, blocks in self._chunks(flat.numel()):
            flat[kept] = self._decode_chunk(block.codes[kept], block.scales[blocks])
        return flat

    def _decode_chunk(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = self._functional.dequantize_blockwise(
            codes, absmax=scales, blocksize=self._block_size
        )
        return decoded

    def _chunks(self, num_elements: int) -> Iterator[tuple[slice, slice]]:
        """Yields ranges of elements with the ranges of blocks in which they lie."""
        for start in range(0, num_elements, _CHUNK_ELEMENTS):
            end = min(start + _CHUNK_ELEMENTS, num_elements)
            yield (
                slice(start, end),
                slice(start // self._block_size, -(-end // self._block_size)),
            )


def _figures(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Returns norm and largest element, of what it was and of the error, on the device."""
    error = after - before
    norm = torch.linalg.vector_norm
    return torch.stack([norm(before), norm(error), norm(error, math.inf), norm(before, math.inf)])


def _loss(figures: list[torch.Tensor], num_elements: int) -> _Loss:
    norms, errors, errors_max, largest = zip(*torch.stack(figures).tolist(), strict=True)
    return _Loss(
        squared_norm=math.fsum(norm**2 for norm in norms),
        squared_error=math.fsum(error**2 for error in errors),
        max_abs=max(errors_max),
        largest=max(largest),
        num_elements=num_elements,
    )


class _Quantized:
    """Codes and scales of one span."""

    __slots__ = ("__weakref__", "_codec", "_loaded", "codes", "dtype", "loss", "scales")

    def __init__(
        self,
        codec: _Codec,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        dtype: torch.dtype,
        loss: _Loss | None,
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.dtype = dtype
        self.loss = loss
        self._codec = codec
        self._loaded: Callable[[], torch.UntypedStorage | None] = not_loaded

    @property
    def num_bytes(self) -> int:
        """Bytes of the span."""
        return self.codes.numel() * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def load(self) -> torch.UntypedStorage:
        """Dequantises."""
        storage = self._loaded()
        if storage is None:
            storage = self._codec.decode(self).untyped_storage()
            self._loaded = weakref.ref(storage)
        return storage


def _without_gaps(span: Span, dtype: torch.dtype) -> torch.Tensor:
    """Returns the elements of a span, zeros where no tensor has any.

    What lies between tensors may be anything, and a large value there would spoil its block.
    """
    flat = span.elements(dtype)
    if any(_fills(view.shape, view.stride, flat.numel()) for view in span.views):
        return flat
    used = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    for view in span.views:
        used.as_strided(view.shape, view.stride, view.offset).fill_(True)
    return flat if bool(used.all()) else flat.masked_fill(~used, 0)


def _fills(shape: torch.Size, stride: tuple[int, ...], num_elements: int) -> bool:
    """Returns whether a view reaches every one of so many elements, by strides alone."""
    reached = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if step > 0 and size > 1:
            if step > reached:
                return False
            reached += (size - 1) * step
    return reached == num_elements


def _bitsandbytes() -> Any:  # noqa: ANN401 - an optional module
    try:
        return import_quietly("bitsandbytes.functional")
    except ImportError as error:
        raise ValueError(
            f"compress needs bitsandbytes, which cannot be imported ({error}): expected version "
            "0.50 or newer. Install rematic[bitsandbytes], or choose a lossless action."
        ) from error
