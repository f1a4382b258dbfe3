"""What a Trainer counts inside a training step, put back before the step runs again."""

from __future__ import annotations

from typing import Any

from rematic.activations.kept_values import CONTAINERS, copied
from rematic.hosts.accelerate_step import AcceleratorCounters
from rematic.transaction.module_snapshot import refill

_PLAIN = frozenset({bool, int, float, str, type(None)})
_LARGEST = 10_000
"""Containers with more entries hold data, not counters."""


class TrainerCounters:
    """Numbers and containers that are attributes of a Trainer or of its state.

    TRL's trainers keep metrics, token counts and logs of completions there.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:  # noqa: ANN401 - whatever subclass it is
        self._accumulation = AcceleratorCounters(trainer.accelerator)
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        for held in (vars(trainer), vars(trainer.state)):
            plain = {name: value for name, value in held.items() if type(value) in _PLAIN}
            self._plain.append((held, plain))
            self._containers += [
                (value, copied(value)) for name, value in held.items() if _counts(name, value)
            ]

    def restore(self) -> None:
        """Puts all of it back to before the step."""
        self._accumulation.restore()
        for held, plain in self._plain:
            held.update(plain)
        for container, contents in self._containers:
            refill(container, contents)


def _counts(name: str, value: Any) -> bool:  # noqa: ANN401 - any attribute
    return (
        type(value) in CONTAINERS
        and len(value) <= _LARGEST
        and not name.endswith("_dataset")
        and name != "log_history"
    )
