from __future__ import annotations

from typing import Any, cast

import pytest

from rematic.training import heap_cap
from rematic.training.heap_cap import HeapCap

NOBODY = cast("Any", None)


class Cap:
    """Notes what is done with it."""

    def __init__(self, *, usable: bool = True) -> None:
        self.usable = usable
        self.done: list[str] = []

    def __enter__(self) -> Cap:
        if not self.usable:
            raise RuntimeError("cannot cap the heap of this process")
        self.done.append("begin")
        return self

    def __exit__(self, *error: object) -> None:
        self.done.append("end")

    def release_ballast(self) -> None:
        self.done.append("release")


@pytest.fixture
def cap(monkeypatch: pytest.MonkeyPatch) -> Cap:
    fake = Cap()

    def capped_heap(room_bytes: int) -> Cap:
        fake.done.append(f"room {room_bytes}")
        return fake

    monkeypatch.setattr(heap_cap, "capped_heap", capped_heap)
    monkeypatch.setattr(heap_cap, "warm_up_threads", lambda: fake.done.append("warm up"))
    return fake


def test_caps_from_the_start_to_the_end_of_a_fit(cap: Cap) -> None:
    callback = HeapCap(lambda: 100, notify=pytest.fail)
    callback.on_train_start(NOBODY, NOBODY)
    assert cap.done == ["warm up", "room 100", "begin"]
    callback.on_train_end(NOBODY, NOBODY)
    callback.on_exception(NOBODY, NOBODY, RuntimeError())
    assert cap.done[3:] == ["end"]


def test_frees_room_for_the_handler_of_an_error(cap: Cap) -> None:
    callback = HeapCap(lambda: 100, notify=pytest.fail)
    callback.on_train_start(NOBODY, NOBODY)
    callback.on_exception(NOBODY, NOBODY, RuntimeError())
    assert cap.done[3:] == ["release", "end"]


def test_says_where_a_platform_has_no_cap(cap: Cap) -> None:
    cap.usable = False
    told: list[str] = []
    callback = HeapCap(lambda: 100, notify=told.append)
    callback.on_train_start(NOBODY, NOBODY)
    callback.on_train_end(NOBODY, NOBODY)
    assert told == ["memory.heap_cap has no effect here: cannot cap the heap of this process"]
    assert "end" not in cap.done
