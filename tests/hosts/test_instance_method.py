"""Methods wrapped on one instance, and what is left when they are not any more."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from rematic.hosts.instance_method import InstanceMethod


class Owner:
    def __init__(self) -> None:
        self.value = 2

    def times(self, number: int) -> int:
        return self.value * number


def doubled(method: Callable[[int], int], number: int) -> int:
    return 2 * method(number)


def ten_times(number: int) -> int:
    return 10 * number


def test_the_instance_is_wrapped_and_its_class_is_not() -> None:
    owner, other = Owner(), Owner()
    InstanceMethod(owner, "times", doubled)
    assert owner.times(3) == 12
    assert other.times(3) == 6


def test_removing_leaves_nothing() -> None:
    owner = Owner()
    wrapped = InstanceMethod(owner, "times", doubled)
    wrapped.remove()
    wrapped.remove()
    assert vars(owner) == {"value": 2}


def test_removing_puts_back_what_was_on_the_instance() -> None:
    owner = Owner()
    owner.times = ten_times
    wrapped = InstanceMethod(owner, "times", doubled)
    assert owner.times(3) == 60
    wrapped.remove()
    assert owner.times is ten_times


def test_under_a_wrapper_of_somebody_else_it_goes_silent() -> None:
    owner = Owner()
    wrapped = InstanceMethod(owner, "times", doubled)
    InstanceMethod(owner, "times", lambda method, number: method(number) + 1)
    assert owner.times(3) == 13
    wrapped.remove()
    assert owner.times(3) == 7


@pytest.mark.parametrize("previous", [None, ten_times], ids=["of the class", "of the instance"])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_is_plain(
    copied: Callable[[Owner], Owner], previous: Callable[[int], int] | None
) -> None:
    owner = Owner()
    if previous is not None:
        owner.times = previous
    InstanceMethod(owner, "times", doubled)
    twin = copied(owner)
    twin.value = 5
    assert twin.times(3) == (15 if previous is None else 30)
    assert owner.times(3) == (12 if previous is None else 60)
