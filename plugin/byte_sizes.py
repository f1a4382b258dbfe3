"""Reads and writes byte sizes as people do: `350MiB`, `20 GB`, `1.5GiB`."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[a-zA-Z]*)")
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES_OF_UNIT = {unit.lower(): size for unit, size in {"B": 1, **_DECIMAL, **_BINARY}.items()}
MOST = 2**63 - 1
"""Most bytes that a size may stand for: what 64 bits address."""
_EXPECTED = "expected a size above zero, such as '20GiB', '350 MB' or a whole number of bytes"


def parse_bytes(text: str | int) -> int:
    """Returns the bytes that a size stands for, rounded down to whole bytes.

    Args:
        text: A number with one of the units B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB,
            TiB (powers of 1024), in upper or lower case, or a whole number of bytes.

    Raises:
        ValueError: If it is no size above zero, is over 8 EiB, or its unit is none of these.

    Examples:
        >>> parse_bytes("1.5GiB")
        1610612736
        >>> parse_bytes("20 GB")
        20000000000
        >>> parse_bytes(1234)
        1234
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"not a byte size: {text!r}; {_EXPECTED}")
    size_bytes = text if isinstance(text, int) else _read(text)
    if size_bytes <= 0:
        raise ValueError(f"not a usable byte size: {text!r} is {size_bytes} bytes; {_EXPECTED}")
    if size_bytes > MOST:
        raise ValueError(f"not a usable byte size: {str(text)[:40]!r} is over 8 EiB; {_EXPECTED}")
    return size_bytes


def _read(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a byte size: {text!r}; {_EXPECTED}")
    number, unit = Fraction(match["number"]), match["unit"]
    if not unit:
        if number.denominator != 1:
            raise ValueError(f"not a whole number of bytes: {text!r}; {_EXPECTED}")
        return int(number)
    if unit.lower() not in _BYTES_OF_UNIT:
        raise ValueError(f"unknown unit {unit!r} in the byte size {text!r}; {_advice(match)}")
    return int(number * _BYTES_OF_UNIT[unit.lower()])


def _advice(match: re.Match[str]) -> str:
    letter = match["unit"].upper().removesuffix("I")
    if f"{letter}B" in _DECIMAL:  # `20G` and `20Gi` leave open which of the two is meant
        size = f"{match['number']}{letter}"
        return f"write '{size}iB' (powers of 1024) or '{size}B' (powers of 1000)"
    return f"expected one of B, {', '.join(_DECIMAL)}, {', '.join(_BINARY)}"


def format_bytes(size_bytes: int | None) -> str:
    """Writes bytes in the largest binary unit that leaves a number of 1 or more.

    None, for bytes that nobody could measure, is `unknown`.

    Examples:
        >>> format_bytes(350 * 2**20)
        '350.0 MiB'
        >>> format_bytes(-512)
        '-512 B'
    """
    if size_bytes is None:
        return "unknown"
    sign, rest = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if rest < 2**10:
        return f"{sign}{rest} B"
    for unit, unit_bytes in _BINARY.items():
        written = f"{rest / unit_bytes:.1f}"
        if unit == "TiB" or float(written) < 1024:  # 1023.97 KiB is written as 1.0 MiB
            break
    return f"{sign}{written} {unit}"
