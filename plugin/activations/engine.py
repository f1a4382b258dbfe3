"""The units of one model and their ledger: what a session applies its plans to."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from rematic.activations import torch_private
from rematic.activations.collectives import go_with_all_ranks
from rematic.activations.compiled import refuse_compiled_around
from rematic.activations.ledger import Ledger
from rematic.activations.notices import Notice
from rematic.activations.other_owners import OtherOwners, TakenOver
from rematic.activations.routers import find_routers, refuse_idle_patterns
from rematic.activations.routing import Routing
from rematic.activations.selective import AtMissing, OpSelection, warn_of_missing
from rematic.activations.stash_places import StashPlaces
from rematic.activations.tiling import Tiling
from rematic.activations.token_wise_parts import PartsMode, TokenWiseParts
from rematic.activations.unit import Unit
from rematic.activations.unit_forward import UnitForward
from rematic.activations.units import find_units
from rematic.activations.wrappers import class_name, module_at, unwrapped
from rematic.memory import load_compiler_now
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

_log = logging.getLogger("rematic")


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
        _refuse_data_parallel(model)
        refuse_idle_patterns(model, routers)
        found = find_units(model, patterns, routers=routers)
        refuse_compiled_around(model, [name for name, _ in found])
        self.classes = {name: class_name(module) for name, module in found}
        trusted = {name for pattern in trust for name in match_names(pattern, self.classes)}
        self._owners = OtherOwners(model, dict(found))
        self.ledger = Ledger()
        self.units = [
            Unit(name, module, position=i, ledger=self.ledger)
            for i, (name, module) in enumerate(found)
        ]
        self._model = weakref.ref(model)
        self._routers = tuple(routers)
        for unit in self.units:
            unit.trusted = unit.name in trusted
            self._bind_routers(unit)
        load_compiler_now()  # not in the first batch, whose frames it would hold
        torch_private.keep_compiler_out("rematic")
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._places = StashPlaces(device, scratch_dir, self.ledger.tell)
        self._selections: dict[tuple[str, tuple[str, ...]], OpSelection] = {}
        self._tilings: dict[tuple[str, Action], Tiling] = {}
        self._parts: dict[str, TokenWiseParts] = {}
        self._has_told_missing = False

    def _bind_routers(self, unit: Unit) -> None:
        inside = find_routers(unit.module, self._routers, prefix=f"{unit.name}.")
        if inside and unit.is_compiled:
            unit.note_once("its routers are compiled, so a replay may send tokens elsewhere")
            inside = []
        unit.routing = Routing(inside) if inside else None

    def _follow_changes(self) -> None:
        """Takes note of modules that were exchanged or compiled since the last plan."""
        torch_private.keep_compiler_out("rematic")
        model = self._model()
        for unit in self.units:
            module = None if model is None else module_at(model, unit.name)
            if module is None or (module is unit.known_module() and not unit.is_bypassed()):
                continue
            same = unwrapped(module) is unit.known_module()
            if unit.routing is not None:
                unit.routing.remove()
            unit.follow(module)
            self._bind_routers(unit)
            if not same:
                self.classes[unit.name] = class_name(module)
                self._selections.clear()
                self._tilings.clear()
                self._parts.clear()
            unit.note_once(
                "it was compiled after attaching, and is managed around what was compiled"
                if same
                else "another module stands in its place, and is managed from now on"
            )

    def tell_beginning(self) -> None:
        """Tells the journal what was taken over when the model was attached."""
        for taken in self._owners.taken_over:
            self.ledger.tell(_of(taken))

    def apply(
        self, plan: Plan, *, unmeasured: Sequence[bool] = (), agreed: Sequence[bool] = ()
    ) -> None:
        """Makes the next records start as the plan says.

        Args:
            plan: The plan.
            unmeasured: For each unit, whether what it keeps is not known; none by default.
            agreed: For each unit, whether its action is the same on all ranks; none by default.
        """
        self._follow_changes()
        for taken in self._owners.take_flags():
            self.ledger.tell(_of(taken))
        for unit, is_unmeasured in zip(self.units, unmeasured, strict=False):
            unit.unmeasured = is_unmeasured
        for i, (unit, action) in enumerate(zip(self.units, plan.actions, strict=True)):
            unit.starts_held = isinstance(action, (Keep, Offload, Compress))
            is_chosen = i < len(agreed) and not agreed[i]
            unit.selection = self._selection(unit.name, action, is_chosen=is_chosen)
            unit.stash = self._places.of(action, unit.name)
            unit.tiling = self._tiling(unit.name, action)
        for i, unit in enumerate(self.units):
            unit.agreed = i < len(agreed) and agreed[i]
            go_with_all_ranks(unit)

    def stand_aside(self, yes: bool) -> None:
        """Runs kept units as they are, without records that could be evicted, or no longer.

        The last of them keeps its own: by it the ledger sees where backward begins.
        """
        for unit in self.units:
            unit.stands_aside = False
        kept = [unit for unit in self.units if unit.starts_held and unit.stash is None]
        for unit in kept[:-1] if yes else ():
            unit.stands_aside = not unit.unmeasured

    def slice_parts(self, how: PartsMode) -> None:
        """Says how the token-wise parts of units run in the next records.

        Args:
            how: `whole`; `asked`, which is whole after a proof on a few positions of the call; or
                `sliced`, which is in slices where the proof allows it.
        """
        for unit in self.units:
            unit.parts = None
            if how != "whole" and not unit.is_compiled:
                unit.parts = self._parts.setdefault(unit.name, TokenWiseParts())
                unit.parts.only_asks = how == "asked"

    def may_have_token_wise_parts(self) -> bool:
        """Returns whether a part of some unit is known to be token-wise, or none was asked yet."""
        asked = [parts for parts in self._parts.values() if parts.were_asked]
        return not asked or any(parts.are_known for parts in asked)

    def joint_units(self) -> list[str]:
        """Returns the units whose forward was seen to exchange tensors with other ranks."""
        return [unit.name for unit in self.units if unit.joint is not None]

    def _selection(self, name: str, action: Action, *, is_chosen: bool) -> OpSelection | None:
        if not isinstance(action, Selective):
            return None
        key = (name, action.save)
        if key not in self._selections:
            at_missing: AtMissing | None = self._tell_missing if is_chosen else warn_of_missing
            if action.save == DEFAULT_SAVED:  # no unit has all of these
                at_missing = None
            self._selections[key] = OpSelection(name, action.save, at_missing=at_missing)
        return self._selections[key]

    def _tell_missing(self, name: str, missing: Sequence[str], seen: Collection[str]) -> None:
        """Says once of all plans that they name ops which do not occur: nobody wrote these."""
        if not self._has_told_missing:
            self._has_told_missing = True
            text = (
                "%d of the ops that a plan keeps do not occur in unit %r: it was traced otherwise"
            )
            _log.info(text, len(missing), name)

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


def _refuse_data_parallel(model: nn.Module) -> None:
    # Its replicas run as they are: nothing would be managed but what one device does.
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ValueError(
                f"{name or 'the model'} is an nn.DataParallel over the devices "
                f"{module.device_ids}, which calls copies of the units: expected one device for "
                "each process. Train with DistributedDataParallel (`torchrun`), or train the "
                "module inside, its `.module`, on one device."
            )
