from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from rematic.training import byte_tokens
from rematic.training.byte_tokens import VOCABULARY_SIZE, decode, encode


def test_examples() -> None:
    assert doctest.testmod(byte_tokens).attempted > 0
    assert doctest.testmod(byte_tokens).failed == 0


@given(st.binary())
def test_decoding_gives_the_bytes_back(text: bytes) -> None:
    ids = encode(text, max_length=len(text) + 2)
    assert decode(ids) == text
    assert (ids[0], ids[-1]) == (1, 2)
    assert all(0 <= token < VOCABULARY_SIZE for token in ids)


@given(st.binary(), st.integers(1, 20))
def test_never_longer_than_asked(text: bytes, max_length: int) -> None:
    whole = encode(text, max_length=len(text) + 2)
    assert encode(text, max_length=max_length) == whole[:max_length]
