"""What modules hold that is not torch's: generators of Python and NumPy, arrays, iterators."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rematic.transaction.gradients import RestoreError

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
KINDS = (*GENERATORS, np.ndarray)
"""Types whose instances `StateOutsideTorch` knows, beside iterators."""


@dataclass(frozen=True, slots=True)
class StateOutsideTorch:
    """One value and how it is put back.

    Raises:
        RestoreError: By `check`, if it cannot be.
    """

    restore: Callable[[], object]
    name: str
    can_restore: bool = True
    is_changed: Callable[[], bool] = lambda: False
    """Whether it differs from what was taken down; told of arrays only."""

    @classmethod
    def of_generator(cls, generator: Any, name: str = "") -> StateOutsideTorch:  # noqa: ANN401
        """Takes down the state of a generator of `GENERATORS`, or of one of torch."""
        if isinstance(generator, torch.Generator):
            of_torch = generator.get_state()
            return cls(lambda: generator.set_state(of_torch), name)
        if isinstance(generator, random.Random):
            state: Any = generator.getstate()
            return cls(lambda: generator.setstate(state), name)
        if isinstance(generator, np.random.RandomState):
            state = generator.get_state()
            return cls(lambda: generator.set_state(state), name)
        state = copy.deepcopy(generator.bit_generator.state)

        def restore() -> None:
            generator.bit_generator.state = state

        return cls(restore, name)

    @classmethod
    def of_array(cls, array: np.ndarray[Any, Any], name: str) -> StateOutsideTorch:
        """Copies an array, which is then changed back in place."""
        before = array.copy()

        def restore() -> None:
            if array.flags.writeable:
                array[...] = before

        return cls(restore, name, is_changed=lambda: array.tobytes() != before.tobytes())

    @classmethod
    def of_iterator(cls, holder: dict[str, Any], name: str) -> StateOutsideTorch:
        """Copies an iterator, whose place a further copy takes; some cannot be copied."""
        before = _copied(holder[name])

        def restore() -> None:
            holder[name] = _copied(before)

        return cls(restore, name, can_restore=before is not None)

    def check(self) -> None:
        """Refuses what cannot be put back."""
        if not self.can_restore:
            raise RestoreError(
                f"attribute {self.name!r} of a module is an iterator that cannot be copied, so "
                "that a second attempt would take what comes next. Keep it outside of the model."
            )


def is_iterator(value: object) -> bool:
    """Returns whether a value gives other things each time that it is asked."""
    return hasattr(type(value), "__next__")


def _copied(iterator: Any) -> Any:  # noqa: ANN401 - an iterator, None if it cannot be copied
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # itertools, from Python 3.12
            # a copy of `zip`, `map`, `cycle` would take from the same iterator inside
            _, arguments, *rest = iterator.__reduce_ex__(4)
            state = rest[0] if rest and isinstance(rest[0], tuple) else ()
            shares = any(map(is_iterator, (*arguments, *state)))
            return None if shares else copy.copy(iterator)
    except TypeError:
        return None
