"""The allocator against a model: no overlap, nothing lost, no growth without need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematic.stash.segments import Segment, Segments

PAGE, CHUNK = 16, 256


def take(segments: Segments, num_bytes: int) -> Segment | None:
    """Takes, growing where the file has to; None where the cap forbids it."""
    segment = segments.take(num_bytes)
    if segment is None:
        sizes = segments.growths(num_bytes)
        if not sizes:
            return None
        segments.add_chunk(sizes[0])
        segment = segments.take(num_bytes)
        assert segment is not None
    return segment


@settings(max_examples=150)
@given(
    script=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 600)),
            st.tuples(st.just("free"), st.integers(0, 1000)),
        ),
        max_size=80,
    ),
    cap_bytes=st.one_of(st.none(), st.integers(16, 4000)),
)
def test_any_sequence_of_takes_and_frees(
    script: list[tuple[str, int]], cap_bytes: int | None
) -> None:
    segments = Segments(page_bytes=PAGE, chunk_bytes=CHUNK, cap_bytes=cap_bytes)
    mine: dict[tuple[int, int], str] = {}  # every page that belongs to somebody
    held: list[tuple[Segment, str]] = []
    for number, (what, value) in enumerate(script):
        if what == "free" and held:
            segment, owner = held.pop(value % len(held))
            for page in pages(segment):
                assert mine.pop(page) == owner
            segments.give_back(segment)
        elif what == "take":
            largest, size_before = segments.largest_free_bytes, segments.size_bytes
            taken = take(segments, value)
            if taken is None:
                assert cap_bytes is not None
                assert value > largest
                assert size_before + value > cap_bytes - PAGE
                continue
            assert taken.num_bytes == -(-value // PAGE) * PAGE
            if segments.size_bytes > size_before:
                assert value > largest  # it grows only when nothing fits
            for page in pages(taken):
                assert page not in mine
                mine[page] = str(number)
            held.append((taken, str(number)))
        assert segments.used_bytes == sum(segment.num_bytes for segment, _ in held)
        assert segments.used_bytes <= segments.size_bytes <= (cap_bytes or 2**40)
    for segment, _ in held:
        segments.give_back(segment)
    assert segments.used_bytes == 0
    # Everything has coalesced: each chunk is one free piece again.
    assert [len(chunk.free) for chunk in segments._chunks] == [1] * len(segments._chunks)


def pages(segment: Segment) -> list[tuple[int, int]]:
    start = segment.offset_bytes // PAGE
    assert segment.offset_bytes % PAGE == 0
    return [(segment.chunk, start + page) for page in range(segment.num_bytes // PAGE)]


def test_batches_of_the_same_shapes_never_grow_the_file() -> None:
    segments = Segments(page_bytes=PAGE, chunk_bytes=CHUNK)
    sizes = [160, 48, 16, 400, 160, 96]
    for step in range(50):
        held = [take(segments, size) for size in sizes]
        if step == 0:
            after_first = segments.size_bytes
        for segment in held if step % 2 else reversed(held):
            assert segment is not None
            segments.give_back(segment)
    assert segments.size_bytes == after_first <= 2 * sum(sizes)


def test_the_smallest_hole_that_fits_is_taken() -> None:
    segments = Segments(page_bytes=PAGE, chunk_bytes=CHUNK)
    held = [take(segments, size) for size in (64, 16, 32, 16, 48, 16)]
    for index in (0, 2, 4):
        segment = held[index]
        assert segment is not None
        segments.give_back(segment)
    again = segments.take(20)
    assert again == held[2]
    assert segments.largest_free_bytes == 64


@pytest.mark.parametrize(
    ("cap_bytes", "num_bytes", "expected"),
    [
        (None, 16, [256, 16]),
        (None, 300, [304]),
        (100, 16, [96, 16]),
        (100, 96, [96]),
        (100, 97, []),
    ],
)
def test_growths_start_with_a_chunk_and_end_with_the_need(
    cap_bytes: int | None, num_bytes: int, expected: list[int]
) -> None:
    segments = Segments(page_bytes=PAGE, chunk_bytes=CHUNK, cap_bytes=cap_bytes)
    assert segments.growths(num_bytes) == expected


def test_a_large_file_grows_by_a_quarter() -> None:
    segments = Segments(page_bytes=PAGE, chunk_bytes=CHUNK)
    segments.add_chunk(6400)
    assert segments.growths(16) == [1600, 16]


def test_a_handle_that_dies_while_the_allocator_works_does_not_block_it() -> None:
    segments = Segments(page_bytes=PAGE, chunk_bytes=CHUNK)
    segment = take(segments, 16)
    assert segment is not None
    with segments._lock:  # as if a collection began here and found a cycle with a handle in it
        segments.give_back(segment)
    assert segments.used_bytes == 0
