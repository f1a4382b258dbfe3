from __future__ import annotations

import os
import signal
import threading

import pytest

from rematic.training.interrupts import StopRequest


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_raises_where_nobody_defers() -> None:
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            press()
        assert stop.signal_number == signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_deferred_signal_is_only_noted(number: int) -> None:
    told: list[str] = []
    with StopRequest(notify=told.append) as stop:
        stop.defer("after this step")
        press(number)
        assert stop.signal_number == number
    assert told == ["stopping after this step; once more stops at once"]


def test_a_second_signal_raises_unless_it_is_the_same_key_press() -> None:
    clock = Clock()
    with StopRequest(clock=clock) as stop:
        stop.defer("after this step")
        press()
        clock.seconds += 0.5
        press()
        clock.seconds += 1.0
        with pytest.raises(KeyboardInterrupt):
            press()


def test_deferring_takes_the_signals_back_from_a_host() -> None:
    with StopRequest() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a host does
        stop.defer("after this step")
        press(signal.SIGTERM)
        assert stop.signal_number == signal.SIGTERM


def test_a_signal_that_has_waited_is_answered_when_asked_for() -> None:
    with StopRequest() as stop:
        stop.raise_if_asked()
        stop.defer("soon")
        press()
        stop.stop_deferring()
        with pytest.raises(KeyboardInterrupt):
            stop.raise_if_asked()


def test_puts_the_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_watches_nothing_outside_the_main_thread() -> None:
    seen: list[object] = []

    def work() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
