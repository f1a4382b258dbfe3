"""What `compress` costs in precision, told now and then for every unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from rematic.stash import CompressStash, Handle, quantization_error

MEASURED_EVERY = 64
"""Calls of a unit between two measurements: each decodes what was encoded."""


class MeasuredCompressStash:
    """The eight-bit stash as one unit sees it.

    Args:
        inner: The stash of all units.
        tell: Takes a sentence and the figures of an error.
    """

    name = "compress"
    lossy = True

    def __init__(
        self, inner: CompressStash, tell: Callable[[str, Mapping[str, float]], None]
    ) -> None:
        self._inner = inner
        self._tell = tell
        self._num_puts = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the codes and scales that living handles hold, of all units."""
        return self._inner.used_bytes

    def put(self, tensors: Sequence[torch.Tensor]) -> Sequence[Handle | None]:
        """Quantises tensors (see `Stash.put`), and tells how far off they are if it is time."""
        is_due = self._num_puts % MEASURED_EVERY == 0
        handles = self._inner.put(tensors, measured=is_due)
        self._num_puts += 1
        if is_due:
            self._tell_error(handles)
        return handles

    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Does nothing: the tensors are on their device."""

    def close(self) -> None:
        """Does nothing: the stash of all units is closed by whoever made it."""

    def _tell_error(self, handles: Sequence[Handle | None]) -> None:
        error = quantization_error(handles)
        if not error.num_elements:
            return
        self._tell(
            f"8 bits differ from what it saved by {error.relative_l2:.2%} (root mean square), by "
            f"{error.relative_max:.2%} of the largest element at most",
            {
                "relative_rms": error.relative_l2,
                "relative_max": error.relative_max,
                "max_abs": error.max_abs,
                "num_elements": error.num_elements,
            },
        )
