"""What a recipe says of a step's needs on the device it is meant for."""

from __future__ import annotations

from dataclasses import dataclass

from rematic.byte_sizes import parse_bytes
from rematic.recipes.field_checks import positive_number, require, some_text


@dataclass(frozen=True, kw_only=True)
class FiguresConfig:
    """A device, and what a step of the longest sequence needs on it."""

    device: str | None = None
    """Name of the device as `rematic plan --device` takes it; None (default): not said."""
    peak: str | None = None
    """Highest memory in use on each device, such as 21.4GiB; None (default): not known."""
    step_seconds: float | None = None
    """Seconds of a micro-batch of the longest sequence; None (default): not known."""
    tokens_per_second: float | None = None
    """Tokens a second over a whole run, on all devices; None (default): not known."""

    def __post_init__(self) -> None:
        some_text(self, "device", optional=True, remedy="write a name such as H100-SXM, or null")
        some_text(self, "peak", optional=True, remedy="write a size such as 21.4GiB, or null")
        require(
            self,
            "peak",
            self.peak is None or _is_size(self.peak),
            expected="a size with its unit",
            remedy="write for example 21.4GiB",
        )
        positive_number(self, "step_seconds", optional=True, remedy="write seconds, or null")
        positive_number(self, "tokens_per_second", optional=True, remedy="write null")
        for name in ("peak", "step_seconds", "tokens_per_second"):
            require(
                self,
                name,
                self.device is not None or getattr(self, name) is None,
                expected="null, since no device is named",
                remedy="write device",
            )

    @property
    def peak_bytes(self) -> int | None:
        """`peak` in bytes."""
        return None if self.peak is None else parse_bytes(self.peak)


def _is_size(text: str) -> bool:
    try:
        return parse_bytes(text) > 0 and not text.strip().isdecimal()
    except ValueError:
        return False
