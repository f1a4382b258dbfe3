"""Byte sizes: what is read, what is refused, what is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematic.byte_sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("350MiB", 350 * 2**20),
        ("20GiB", 20 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("1TiB", 2**40),
        ("4KiB", 4096),
        ("20GB", 20 * 10**9),
        ("20 GB", 20 * 10**9),
        ("0.25 TB", 250 * 10**9),
        ("2.5KB", 2500),
        ("7B", 7),
        ("  64 mib\n", 64 * 2**20),
        ("1234", 1234),
        (1234, 1234),
        ("0.3KiB", 307),
        ("1.000001MB", 1_000_001),
        ("20.1GB", 20_100_000_000),
    ],
)
def test_sizes_are_read_exactly(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20G", "write '20GiB' (powers of 1024) or '20GB' (powers of 1000)"),
        ("1.5m", "write '1.5MiB' (powers of 1024) or '1.5MB' (powers of 1000)"),
        ("20Gi", "write '20GiB' (powers of 1024) or '20GB' (powers of 1000)"),
        ("20XB", "unknown unit 'XB' in the byte size '20XB'; expected one of B, KB, MB"),
        ("20 %", "not a byte size: '20 %'"),
        ("", "not a byte size: ''"),
        ("GiB", "not a byte size: 'GiB'"),
        ("nan", "not a byte size: 'nan'"),
        ("inf GiB", "not a byte size: 'inf GiB'"),
        ("1e9", "not a byte size: '1e9'"),
        ("1,000", "not a byte size: '1,000'"),
        ("-5GiB", "not a byte size: '-5GiB'"),
        ("12.5", "not a whole number of bytes: '12.5'"),
        ("0", "not a usable byte size: '0' is 0 bytes"),
        ("0.0GiB", "not a usable byte size: '0.0GiB' is 0 bytes"),
        ("0.2B", "not a usable byte size: '0.2B' is 0 bytes"),
        ("8388608TiB", "not a usable byte size: '8388608TiB' is over 8 EiB"),
        ("9" * 400, f"not a usable byte size: '{'9' * 40}' is over 8 EiB"),
        (10**400, "is over 8 EiB"),
        (0, "not a usable byte size: 0 is 0 bytes"),
        (-3, "not a usable byte size: -3 is -3 bytes"),
        (True, "not a byte size: True"),
        (0.9, "not a byte size: 0.9"),
        (float("nan"), "not a byte size: nan"),
        (None, "not a byte size: None"),
        ("\u0661GiB", "not a byte size: '\u0661GiB'"),
    ],
)
def test_anything_else_is_refused_with_advice(text: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_bytes(text)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "expected" in str(caught.value) or "write" in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (350 * 2**20, "350.0 MiB"),
        (1536 * 2**20, "1.5 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20 - 60, "1023.9 KiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-1, "-1 B"),
        (-3 * 2**20, "-3.0 MiB"),
        (None, "unknown"),
    ],
)
def test_sizes_are_written_in_binary_units(size_bytes: int | None, expected: str) -> None:
    assert format_bytes(size_bytes) == expected


@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_written_is_read_back_to_its_digits(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.06)


@given(st.integers(min_value=1, max_value=2**60))
def test_whole_bytes_survive_as_numbers_and_as_text(size_bytes: int) -> None:
    assert parse_bytes(size_bytes) == parse_bytes(str(size_bytes)) == size_bytes
    assert parse_bytes(f"{size_bytes}B") == size_bytes
