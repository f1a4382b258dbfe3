"""Which calls of a unit are checked: its first ones in each mode, and ever fewer later ones."""

from __future__ import annotations

_SECOND_LOOK = 4
"""The call that is checked again, then the 16th, the 64th and so on: many calls pay for few."""


class CheckSchedule:
    """Knows which checks a unit has passed, in training and in evaluation."""

    def __init__(self) -> None:
        self._passed: set[bool] = set()
        self._surveyed: set[bool] = set()
        self._changed: set[bool] = set()
        self._num_calls = 0
        self._looked_at = 1
        self._next_look = _SECOND_LOOK
        self.holds = True
        """Whether calls that are checked stay in memory until they have ended; not those of later
        looks, which would take more memory than their step was planned to take."""

    def begin_call(self, training: bool) -> None:
        """Takes note of a call, which may be the first to change what lies outside."""
        self._num_calls += 1
        if self._num_calls >= self._next_look and training in self._passed:
            self._next_look = 4 * self._num_calls
            self.holds = False
            self.forget(training)
            self._surveyed.discard(training)

    def look_again(self, training: bool) -> None:
        """Has the next call surveyed, since this one changed something that lies outside."""
        self.forget(training)
        self._surveyed.discard(training)
        self._looked_at = self._num_calls

    def forget(self, training: bool) -> None:
        """Lets the calls in this mode show again that they can be replayed."""
        self._passed.discard(training)

    def awaits(self, training: bool) -> bool:
        """Returns whether a call has to show that it can be replayed."""
        return training not in self._passed

    def surveys(self, training: bool) -> bool:
        """Returns whether what lies outside of the unit is compared before and after a call."""
        return training not in self._surveyed

    def found_nothing(self, training: bool) -> None:
        """Takes note that a call has changed nothing outside."""
        self._passed.add(training)
        self._surveyed.add(training)
        self._looked_at = self._num_calls

    def is_first_change(self, training: bool) -> bool:
        """Takes note that a call has changed something outside; a cache is filled once."""
        self._looked_at = self._num_calls
        if training in self._changed:
            self._passed.add(training)
            return False
        self._changed.add(training)
        return True

    def unseen(self) -> str:
        """Says what the calls may have done that were not looked at; empty if all were."""
        num_calls = self._num_calls - self._looked_at
        if num_calls <= 1:
            return ""
        return (
            f", which it had not done when it was last looked at, {num_calls} calls before: "
            "gradients of replays in between may be wrong"
        )
