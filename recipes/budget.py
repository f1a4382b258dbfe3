"""The memory budget of a recipe, as a person writes it and as a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rematic.byte_sizes import parse_bytes
from rematic.recipes.field_checks import spelled

_NO_SIZE = "a fraction of the device above 0 and at most 1, such as 0.9 or 90%, or auto"
_EXPECTED = f"expected a size such as 20GiB, a whole number of bytes, {_NO_SIZE}"
_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_WITH_FRACTION = re.compile(r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=e))(e[-+]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that may be in use on the device, weights and optimizer included."""

    kind: Literal["absolute", "fraction", "auto"] = "auto"
    """What `value` means; `auto` is 95 % of what the device has, less what others hold."""
    value: int | float | None = None
    """Bytes if absolute, a fraction of the device above 0 and at most 1, None if auto."""

    def __post_init__(self) -> None:
        value = self.value
        number = not isinstance(value, bool)
        ok = {
            "absolute": number and isinstance(value, int) and value > 0,
            "fraction": number and isinstance(value, float) and 0 < value <= 1,
            "auto": value is None,
        }
        if not ok.get(self.kind, False):
            raise ValueError(
                f"a budget of kind {self.kind!r} with value {value!r}; expected absolute with a"
                " whole number of bytes, fraction with a float above 0 and at most 1, or auto with"
                " None; parse_budget makes one of what a person writes"
            )

    def __str__(self) -> str:
        """The budget as `parse_budget` reads it, exactly."""
        if self.value is None:
            return "auto"
        if isinstance(self.value, float):
            return str(self.value)
        power, unit = next(one for one in _UNITS if self.value % 2 ** one[0] == 0)
        return f"{self.value // 2**power}{unit}"


def parse_budget(written: int | float | str) -> Budget:
    """Read a budget: bytes, a size, a fraction or a percentage of the device, or `auto`.

    The numbers 1 and "1" are refused, since one byte and the whole device are both meant by them.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(written, str):
        return _parse_text(written.strip())
    if isinstance(written, bool) or not isinstance(written, (int, float)):
        raise ValueError(f"budget is {spelled(written)}; {_EXPECTED}")
    if isinstance(written, float):
        return _fraction(written, written=str(written))
    return _absolute(written)


def _parse_text(text: str) -> Budget:
    if text == "auto":
        return Budget()
    if text.endswith("%") and _NUMBER.fullmatch(text[:-1].strip()):
        return _fraction(float(text[:-1]) / 100, written=text)
    if _WITH_FRACTION.fullmatch(text):
        return _fraction(float(text), written=text)
    return _absolute(text)


def _fraction(value: float, *, written: str) -> Budget:
    if not 0 < value <= 1:
        raise ValueError(f"budget {written} is not a fraction of a device; {_EXPECTED}")
    return Budget(kind="fraction", value=value)


def _absolute(written: int | str) -> Budget:
    if str(written) == "1":
        raise ValueError(
            "budget 1 could mean one byte or the whole device; write 1.0 or 100% for the whole"
            " device, a size such as 20GiB for bytes"
        )
    try:
        return Budget(kind="absolute", value=parse_bytes(written))
    except ValueError as error:
        raise ValueError(f"budget {spelled(written)}: {error}; or {_NO_SIZE}") from error
