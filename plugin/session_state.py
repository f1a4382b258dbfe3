"""What a session saves with a checkpoint, and how it is read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rematic import control
from rematic.control import ControllerState, Costs, History
from rematic.cost.live_profile import StepKind
from rematic.kind_plans import KindPlans
from rematic.kind_plans_plain import kinds_from_plain, kinds_to_plain
from rematic.session_configuration import Configuration, configuration_from_plain
from rematic.typed_values import untyped

STATE_VERSION = 1
"""Version of what is saved."""


class ForeignStateError(ValueError):
    """A state that another version of rematic wrote, or that is of another model."""


@dataclass(frozen=True, kw_only=True)
class SavedSession:
    """The state of a session at a boundary."""

    units: tuple[str, ...]
    """Names of the model's units."""

    num_steps: int
    """Micro-batches finished."""

    history: History
    """The policies so far."""

    costs: Costs
    """What was learned of steps."""

    controller: ControllerState
    """What the controller remembers."""

    kinds: Mapping[StepKind, KindPlans]
    """What the planner learned of kinds of steps; empty without one."""

    configured: Configuration
    """What the session was attached with."""

    def to_plain(self) -> dict[str, Any]:
        """Returns the state as dictionaries, lists, strings and numbers."""
        return {
            "version": STATE_VERSION,
            "units": list(self.units),
            "num_steps": self.num_steps,
            "history": control.history_to_plain(self.history),
            "costs": control.costs_to_plain(self.costs),
            "control": control.controller_to_plain(self.controller),
            "planner": kinds_to_plain(self.kinds),
            "configured": self.configured.to_plain(),
        }


def read_saved_session(state: Mapping[str, Any], *, units: Sequence[str]) -> SavedSession:
    """Returns the state that `to_plain` made.

    Args:
        state: The state.
        units: Names of the units of the model that is to take it up.

    Raises:
        ForeignStateError: If the state is of another version or another model.
        ValueError: If it is damaged.
    """
    if not isinstance(state, Mapping):
        raise _damaged(f"it is {type(state).__name__}")
    version, saved = state.get("version"), state.get("units")
    if version != STATE_VERSION:
        raise ForeignStateError(
            f"the saved state has version {version!r}: expected {STATE_VERSION}. Resume with "
            "the version of rematic that wrote it, or start without its state."
        )
    if not isinstance(saved, list):
        raise _damaged(f"its units are {saved!r}")
    if saved != list(units):
        raise ForeignStateError(
            f"the saved state is of another model: it has {len(saved)} units "
            f"({_span(saved)}), this one {len(units)} ({_span(units)}). Resume with "
            "the model that was saved, or start without its state."
        )
    try:
        read = _read(state)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    fault = untyped(read, SavedSession, where="state")
    if fault is None and not read.history.entries:
        fault = "state.history.entries is empty"
    if fault is not None:
        raise _damaged(fault)
    return read


def _read(state: Mapping[str, Any]) -> SavedSession:
    return SavedSession(
        units=tuple(state["units"]),
        num_steps=state["num_steps"],
        history=control.history_from_plain(state["history"]),
        costs=control.costs_from_plain(state["costs"]),
        controller=control.controller_from_plain(state["control"]),
        kinds=kinds_from_plain(state["planner"]),
        configured=configuration_from_plain(state["configured"]),
    )


def _damaged(why: str) -> ValueError:
    return ValueError(
        f"the saved state is damaged ({why}): expected what `state_dict` returned. Resume from "
        "another checkpoint, or start without its state."
    )


def _span(names: Sequence[str]) -> str:
    return f"{names[0]} .. {names[-1]}" if names else "none"
