"""What is evicted first, how much, and what is left alone."""

from __future__ import annotations

import threading

import pytest
import torch

from rematic.activations import Ledger
from rematic.activations.record import Record
from tests.activations.blocks import Block, make_input, make_model
from tests.activations.parity import attached

ONE = 4 * 8 * 4
"""Bytes that one block keeps of an input `(4, 8)`."""


def _forward(seconds: list[float | None]) -> tuple[Ledger, torch.Tensor]:
    """A graph of kept blocks whose forwards are said to have taken so many seconds."""
    model = make_model(depth=len(seconds))
    with attached(model, kept=True) as engine:
        loss = model(make_input())
    for record, value in zip(engine.ledger.records(), seconds, strict=True):
        record.forward_seconds = value
    return engine.ledger, loss


ORDER: dict[str, tuple[list[float | None], list[int]]] = {
    "equal units: the oldest first": ([1.0, 1.0, 1.0], [0, 1, 2]),
    "nearly equal ones too": ([1.1, 1.0, 0.95], [0, 1, 2]),
    "the cheapest bytes first": ([4.0, 1.0, 2.0], [1, 2, 0]),
    "a forward that still runs is last": ([1.0, 9.0, None], [0, 1, 2]),
    "also when it is the oldest": ([None, 9.0, 1.0], [2, 1, 0]),
}


@pytest.mark.parametrize(("seconds", "order"), ORDER.values(), ids=ORDER.keys())
def test_most_bytes_per_second_of_recomputing_go_first(
    seconds: list[float | None], order: list[int]
) -> None:
    ledger, loss = _forward(seconds)
    assert ledger.evict(1 << 40).units == tuple(f"blocks.{i}" for i in order)
    loss.backward()


def test_larger_records_of_equal_cost_go_first() -> None:
    model = make_model(depth=2)
    with attached(model, kept=True) as engine:
        outputs = [
            block(make_input(rows)) for block, rows in zip(model.blocks, (4, 400), strict=True)
        ]
    for record in engine.ledger.records():
        record.forward_seconds = 1.0
    assert engine.ledger.evict(1).units == ("blocks.1",)
    assert engine.ledger.evict(1).units == ("blocks.0",)
    assert len(outputs) == 2


@pytest.mark.parametrize(
    ("wanted", "units"), [(1, 1), (ONE, 1), (ONE + 1, 2), (3 * ONE, 3), (1 << 40, 3), (0, 0)]
)
def test_only_as_much_as_is_asked_for_goes(wanted: int, units: int) -> None:
    ledger, loss = _forward([1.0, 1.0, 1.0])
    eviction = ledger.evict(wanted)
    assert len(eviction.units) == units
    assert eviction.bytes_freed == units * ONE
    assert ledger.resident_bytes() == (3 - units) * ONE
    assert (ledger.counts.num_evictions, ledger.counts.evicted_bytes) == (units, units * ONE)
    loss.backward()


def test_pinned_and_busy_records_stay() -> None:
    ledger, loss = _forward([1.0, 1.0, 1.0])
    first, second, _ = ledger.records()
    first.pinned = "by the test"
    second.busy = True
    assert ledger.resident_bytes() == 2 * ONE
    assert ledger.evict(1 << 40).units == ("blocks.2",)
    second.busy = False
    loss.backward()


def test_a_record_locked_by_another_thread_stays() -> None:
    ledger, loss = _forward([1.0, 1.0, 1.0])
    record = ledger.records()[0]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with record.lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    assert record.evict() == 0
    assert ledger.evict(1 << 40).units == ("blocks.1", "blocks.2")
    done.set()
    thread.join()
    loss.backward()


def test_the_record_that_backward_reads_is_spared_while_there_are_others() -> None:
    ledger, loss = _forward([1.0, 1.0, 1.0])
    evicted: list[tuple[str, ...]] = []

    def at_backward(record: Record) -> None:
        while freed := ledger.evict(1, spare_active=True).units:
            evicted.append((record.name, *freed))

    ledger.at_backward = at_backward
    loss.backward()
    assert evicted == [("blocks.2", "blocks.0"), ("blocks.2", "blocks.1"), ("blocks.2", "blocks.2")]
    assert ledger.counts.replays == {"blocks.2": 1, "blocks.1": 1, "blocks.0": 1}


def test_backward_announces_each_record_once() -> None:
    model = make_model()
    names: list[str] = []
    with attached(model, kept=[True, False, True]) as engine:
        engine.ledger.at_backward = lambda record: names.append(record.name)
        for _ in range(2):
            model(make_input()).backward()
    assert names == ["blocks.2", "blocks.1", "blocks.0"] * 2


def test_records_are_those_that_backward_still_needs() -> None:
    model = make_model()
    with attached(model, kept=True) as engine:
        loss = model(make_input())
        assert [record.name for record in engine.ledger.records()] == [
            f"blocks.{i}" for i in range(3)
        ]
        loss.backward()
        assert engine.ledger.records() == []
        for _ in range(300):
            model(make_input())
        assert len(engine.ledger._records) < 200


def test_a_tensor_kept_elsewhere_is_let_go_but_not_counted_as_freed() -> None:
    class Sigmoid(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.up(x))

    model = make_model(Sigmoid, 2)
    with attached(model, kept=True) as engine:
        first = model.blocks[0](make_input())
        second = model.blocks[1](first)
        assert engine.ledger.resident_bytes() == 2 * ONE
        assert engine.ledger.evict(1 << 40).bytes_freed == 0
        assert engine.ledger.resident_bytes() == 0
        second.sum().backward()
    assert engine.ledger.counts.replays.total() == 2
