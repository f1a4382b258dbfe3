"""Fills sequences up with whole documents."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_documents(lengths: Sequence[int], *, capacity: int) -> list[tuple[int, ...]]:
    """Puts documents together into sequences of at most `capacity` tokens.

    Best fit, the longest first (Johnson 1973): a document goes where it leaves the least room.

    Args:
        lengths: Tokens of each document, none above the capacity.
        capacity: Tokens in a sequence.

    Returns:
        Positions of the documents of each sequence; every document is in one.

    >>> pack_documents([5, 3, 8, 2], capacity=8)
    [(2,), (0, 1), (3,)]
    """
    # (room, position of the sequence), sorted, so that the best fit is found by bisection
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for position in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        length = lengths[position]
        found = bisect_left(rooms, (length, -1))
        if found < len(rooms):
            room, sequence = rooms.pop(found)
            sequences[sequence].append(position)
        else:
            room, sequence = capacity, len(sequences)
            sequences.append([position])
        insort(rooms, (room - length, sequence))
    return [tuple(sorted(sequence)) for sequence in sequences]
