"""Turns text into token ids, one per byte, with nothing to download.

Ids 0, 1 and 2 mark padding, the beginning and the end of a text; byte b has the id b + 3; the id
after the last byte marks what a masked language model is to guess.
"""

from __future__ import annotations

from collections.abc import Sequence

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
BYTE_OFFSET = 3
"""Id of the byte 0."""

VOCABULARY_SIZE = BYTE_OFFSET + 256
"""Least `vocab_size` of a model that reads bytes."""

MASK_ID = VOCABULARY_SIZE
"""Needed by masked language models only."""


def encode(text: bytes, *, max_length: int) -> list[int]:
    """Token ids of one text: its beginning, its bytes, its end, cut at `max_length`.

    >>> encode(b"ab", max_length=8)
    [1, 100, 101, 2]
    >>> encode(b"abc", max_length=3)
    [1, 100, 101]
    """
    start = [BOS_ID, *(byte + BYTE_OFFSET for byte in text[:max_length])]
    return [*start, EOS_ID][:max_length]


def decode(ids: Sequence[int]) -> bytes:
    """The bytes of token ids, without the marks.

    >>> decode([1, 100, 101, 2])
    b'ab'
    """
    return bytes(token - BYTE_OFFSET for token in ids if BYTE_OFFSET <= token < VOCABULARY_SIZE)
