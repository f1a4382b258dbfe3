"""The heap cap: allocations fail for real, where they should, and the handler can still work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from rematic.memory import capped_heap, glibc
from rematic.memory.heap_cap import CappedHeap

MIB = 2**20
Child = Callable[..., dict[str, Any]]

linux_glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or glibc.read_heap() is None,
    reason="the cap needs Linux with glibc 2.33",
)


@linux_glibc
@pytest.mark.parametrize("malloc", ["use_caching_malloc", "use_mapping_malloc"])
def test_about_the_bytes_asked_for_can_be_taken_and_then_torch_fails(
    child: Child, malloc: str
) -> None:
    told = child(f"""
        could = {malloc}()
        warm_up_threads()
        kept = []
        with capped_heap(100 * 2**20) as cap:
            try:
                while True:
                    kept.append(torch.empty(2**20, dtype=torch.uint8))
            except RuntimeError as error:
                cap.release_ballast()
                text, known = str(error), is_out_of_memory(error)
                wanted = requested_bytes(error)
        tell(could=could, text=text, known=known, wanted=wanted, obtained=len(kept))
    """)
    assert told["could"] is True
    assert told["known"] is True
    assert told["wanted"] == MIB
    assert "DefaultCPUAllocator: can't allocate memory" in str(told["text"])
    assert 94 <= told["obtained"] <= 106  # MiB, of 100


@linux_glibc
def test_memory_that_malloc_holds_already_is_part_of_the_room(child: Child) -> None:
    told = child("""
        use_caching_malloc()
        warm_up_threads()
        block = torch.empty(50 * 2**20, dtype=torch.uint8)
        del block
        kept = []
        with capped_heap(100 * 2**20) as cap:
            try:
                while True:
                    kept.append(torch.empty(2**20, dtype=torch.uint8))
            except RuntimeError:
                cap.release_ballast()
        tell(obtained=len(kept))
    """)
    assert 94 <= told["obtained"] <= 106  # MiB, of 100


@linux_glibc
def test_a_failed_backward_leaves_a_process_that_goes_on(child: Child) -> None:
    told = child("""
        use_mapping_malloc()
        warm_up_threads()
        weight = torch.ones(2**18, requires_grad=True)

        def step(depth):
            value = weight
            for _ in range(depth):
                value = value.exp() * 0.1
            value.sum().backward()

        step(2)
        with capped_heap(16 * 2**20) as cap:
            failed = False
            try:
                step(30)
            except RuntimeError as error:
                cap.release_ballast()
                failed = is_out_of_memory(error)
                error.__traceback__ = None
            cap.hold_ballast()
            for _ in range(10):
                step(10)  # needs 13 of the 16 MiB
        step(30)
        tell(failed=failed)
    """)
    assert told == {"failed": True}


@linux_glibc
def test_with_the_heap_full_to_the_brim_the_ballast_lets_the_handler_work(child: Child) -> None:
    told = child("""
        use_caching_malloc()
        warm_up_threads()
        kept = []

        def fill(size):
            try:
                while True:
                    kept.append(torch.empty(size))
            except (MemoryError, RuntimeError):
                pass

        with capped_heap(40 * 2**20, ballast_bytes=24 * 2**20) as cap:
            for power in (20, 16, 14, 12, 10):
                fill(2**power)
            try:
                [bytearray(2**20) for _ in range(20)]
                full = False
            except MemoryError:
                cap.release_ballast()
                full = True
                report = json.dumps(list(range(100_000)))
        tell(full=full, length=len(report))
    """)
    assert told["full"] is True
    assert told["length"] > 100_000


@linux_glibc
def test_threads_that_were_warmed_up_work_under_the_cap(child: Child) -> None:
    told = child(
        """
        warm_up_threads()
        weight = torch.ones(600, 600, requires_grad=True)
        with capped_heap(32 * 2**20):
            for _ in range(3):
                (weight @ weight).exp().sum().backward()
        tell(threads=torch.get_num_threads())
    """,
        threads=2,
    )
    assert told == {"threads": 2}


@linux_glibc
def test_the_former_soft_limit_comes_back_and_the_hard_one_never_moves(child: Child) -> None:
    told = child("""
        import resource
        warm_up_threads()

        def limits():
            return resource.getrlimit(resource.RLIMIT_DATA)

        seen = [limits()]
        with capped_heap(64 * 2**20) as outer:
            seen.append(limits())
            with capped_heap(2**40) as inner:
                seen.append(limits())
                looser = inner.limit_bytes == outer.limit_bytes
            seen.append(limits())
            with capped_heap(32 * 2**20):
                seen.append(limits())
            try:
                with outer:
                    pass
            except RuntimeError as error:
                again = str(error)
            seen.append(limits())
        seen.append(limits())
        try:
            with capped_heap(64 * 2**20):
                raise KeyError
        except KeyError:
            seen.append(limits())
        outer.release_ballast()
        seen.append(limits())
        tell(seen=seen, looser=looser, again=again, ended=outer.limit_bytes)
    """)
    seen = told["seen"]
    soft = [pair[0] for pair in seen]
    assert {pair[1] for pair in seen} == {seen[0][1]}, "the hard limit"
    assert soft[1] == soft[2] == soft[3] == soft[5], "a cap never loosens another"
    assert soft[4] < soft[1]
    assert soft[0] == soft[6] == soft[7] == soft[8]
    assert told["looser"] is True
    assert told["ended"] is None
    assert told["again"] == "this heap cap is in force already: expected one `with` per cap"


@linux_glibc
def test_a_hard_limit_below_the_cap_is_named(child: Child) -> None:
    told = child("""
        import resource
        warm_up_threads()
        hard = 2**31
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        try:
            with capped_heap(2**40):
                tell(text=None)
        except RuntimeError as error:
            text = str(error)
        tell(text=text)
    """)
    assert "the hard limit RLIMIT_DATA of this process is 2.0 GiB" in str(told["text"])
    assert "Lower the cap or the ballast." in str(told["text"])


@linux_glibc
def test_holes_that_hold_more_than_the_cap_are_warned_of(child: Child) -> None:
    told = child("""
        import warnings
        use_caching_malloc()
        warm_up_threads()
        blocks = [torch.empty(2**20, dtype=torch.uint8) for _ in range(64)]
        del blocks[:-1]  # the last one keeps them from being given back
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with capped_heap(8 * 2**20):
                pass
        tell(texts=[str(warning.message) for warning in caught])
    """)
    (text,) = told["texts"]
    assert "the heap cap of 8.0 MiB over what is in use cannot hold" in text
    assert "Call use_mapping_malloc() when the process starts" in text


@pytest.mark.parametrize("size_bytes", [0, -5])
def test_a_cap_without_room_is_refused(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"a heap cap of {size_bytes} bytes .* leaves no room"):
        capped_heap(size_bytes)


def test_a_negative_ballast_is_refused() -> None:
    with pytest.raises(ValueError, match="ballast_bytes is -1: expected 0 or more"):
        capped_heap(MIB, ballast_bytes=-1)


@pytest.mark.parametrize("reason", ["platform", "allocator"])
def test_a_platform_without_the_limit_says_so(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setattr(glibc, "read_heap", lambda: None)
    cap = capped_heap(MIB)
    assert isinstance(cap, CappedHeap)
    with pytest.raises(RuntimeError, match=r"expected Linux with glibc 2\.33 or newer"):
        cap.__enter__()
    assert cap.limit_bytes is None
