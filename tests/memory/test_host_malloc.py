"""The two ways to run the heap: what is kept, what is returned, what holes cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rematic.memory import glibc, use_caching_malloc, use_mapping_malloc

MIB = 2**20
Child = Callable[..., dict[str, Any]]

needs_glibc = pytest.mark.skipif(glibc.read_heap() is None, reason="needs glibc 2.33")


@needs_glibc
def test_one_keeps_freed_memory_and_the_other_returns_it(child: Child) -> None:
    told = child("""
        from rematic.memory import glibc

        def held_after_a_large_tensor():
            before = glibc.read_heap().held_bytes
            tensor = torch.empty(64 * 2**20, dtype=torch.uint8)
            with_it = glibc.read_heap().held_bytes
            del tensor
            return with_it - before, glibc.read_heap().held_bytes - before

        could = [use_mapping_malloc()]
        mapping = held_after_a_large_tensor()
        could += [use_caching_malloc(), use_caching_malloc()]
        caching = held_after_a_large_tensor()
        tell(could=could, mapping=mapping, caching=caching)
    """)
    assert told["could"] == [True, True, True]
    with_it, after = told["mapping"]
    assert with_it >= 64 * MIB
    assert after < MIB
    with_it, after = told["caching"]
    assert with_it >= 64 * MIB
    assert after >= 64 * MIB


@needs_glibc
def test_blocks_as_large_as_those_of_a_short_sequence_leave_no_holes(child: Child) -> None:
    told = child("""
        from rematic.memory import glibc

        use_mapping_malloc()
        before = glibc.read_heap().free_bytes
        large, small = [], []
        for kib in range(64, 256):
            large.append(torch.empty(kib * 2**10, dtype=torch.uint8))
            small.append(bytes(2**10))  # lies between them, and outlives them
        in_all = sum(map(torch.Tensor.nelement, large))
        del large
        tell(in_all=in_all, in_holes=glibc.read_heap().free_bytes - before)
    """)
    assert told["in_all"] > 29 * MIB
    assert told["in_holes"] < told["in_all"] / 4


@pytest.mark.parametrize("use", [use_caching_malloc, use_mapping_malloc])
def test_without_glibc_they_change_nothing_and_say_so(
    use: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glibc, "_library", lambda: None)
    assert use() is False


def test_another_malloc_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        uordblks = hblkhd = 0

    class Library:
        @staticmethod
        def mallinfo2() -> Empty:
            return Empty()

    monkeypatch.setattr(glibc, "_library", Library)
    glibc._read_statistics.cache_clear()
    try:
        assert glibc.read_heap() is None
        assert glibc.make_in_use_reader() is None
        assert glibc.set_parameters(glibc.mmap_max(0)) is False
    finally:
        monkeypatch.undo()
        glibc._read_statistics.cache_clear()
