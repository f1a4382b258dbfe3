"""The units of one model and their ledger: what a session applies its plans to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from rematic.activations.ledger import Ledger
from rematic.activations.notices import Notice
from rematic.activations.other_owners import OtherOwners, TakenOver
from rematic.activations.routers import find_routers, refuse_idle_patterns
from rematic.activations.routing import Routing
from rematic.activations.selective import OpSelection
from rematic.activations.stash_places import StashPlaces
from rematic.activations.tiling import Tiling
from rematic.activations.unit import Unit, UnitForward
from rematic.activations.units import find_units
from rematic.activations.wrappers import unwrapped
from rematic.policy import (
    DEFAULT_SAVED,
    Action,
    Compress,
    Keep,
    Offload,
    Plan,
    Selective,
    Tile,
    match_names,
)


class Engine:
    """Binds the units of a model, applies plans to them, and undoes both."""

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str] = (),
        *,
        scratch_dir: str | Path | None = None,
        trust: Sequence[str] = (),
        routers: Sequence[str] = (),
    ) -> None:
        _refuse_attached(model)
        refuse_idle_patterns(model, routers)
        found = find_units(model, patterns, routers=routers)
        self.classes = {name: type(unwrapped(module)).__name__ for name, module in found}
        trusted = {name for pattern in trust for name in match_names(pattern, self.classes)}
        self._owners = OtherOwners(model, dict(found))
        self.ledger = Ledger()
        self.units = [
            Unit(name, module, position=i, ledger=self.ledger)
            for i, (name, module) in enumerate(found)
        ]
        for unit in self.units:
            unit.trusted = unit.name in trusted
            inside = find_routers(unit.module, routers, prefix=f"{unit.name}.")
            unit.routing = Routing(inside) if inside else None
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._places = StashPlaces(device, scratch_dir, self.ledger.tell)
        self._selections: dict[tuple[str, tuple[str, ...]], OpSelection] = {}
        self._tilings: dict[tuple[str, Action], Tiling] = {}

    def tell_beginning(self) -> None:
        """Tells the journal what was taken over when the model was attached."""
        for taken in self._owners.taken_over:
            self.ledger.tell(_of(taken))

    def apply(self, plan: Plan, *, unmeasured: Sequence[bool] = ()) -> None:
        """Makes the next records start as the plan says.

        Args:
            plan: The plan.
            unmeasured: For each unit, whether what it keeps is not known; none by default.
        """
        for taken in self._owners.take_flags():
            self.ledger.tell(_of(taken))
        for unit, is_unmeasured in zip(self.units, unmeasured, strict=False):
            unit.unmeasured = is_unmeasured
        for unit, action in zip(self.units, plan.actions, strict=True):
            unit.starts_held = isinstance(action, (Keep, Offload, Compress))
            unit.selection = self._selection(unit.name, action)
            unit.stash = self._places.of(action, unit.name)
            unit.tiling = self._tiling(unit.name, action)

    def _selection(self, name: str, action: Action) -> OpSelection | None:
        if not isinstance(action, Selective):
            return None
        key = (name, action.save)
        if key not in self._selections:
            asked_for = action.save != DEFAULT_SAVED
            self._selections[key] = OpSelection(name, action.save, asked_for=asked_for)
        return self._selections[key]

    def _tiling(self, name: str, action: Action) -> Tiling | None:
        if not isinstance(action, Tile):
            return None
        return self._tilings.setdefault((name, action), Tiling(action))

    def detach(self) -> None:
        """Gives every module its own `forward` back. Records still in a graph keep working."""
        for unit in reversed(self.units):
            unit.restore()
        self._owners.give_back()
        self._places.close()


def _of(taken: TakenOver) -> Notice:
    return Notice(unit=taken.name, kind="taken_over", text=f"{taken.owner} is turned off")


def _refuse_attached(model: nn.Module) -> None:
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, UnitForward) and not forward.silent:
            raise ValueError(
                f"module {name or type(model).__name__!r} is already managed by a session: "
                "expected a model that is not attached. Call `session.detach()` first."
            )
