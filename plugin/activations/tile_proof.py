"""What is known of one module that may run in slices: what the proof said, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from rematic.activations.collectives import watching_collectives
from rematic.activations.key_value_cache import holds_cache
from rematic.activations.replay import announced_as_replay
from rematic.activations.surroundings import Surroundings
from rematic.activations.tile import Call, sequence_length
from rematic.activations.tile_values import objection_at_length
from rematic.activations.token_wise import Objection, objection_to_tiles
from rematic.activations.torch_private import GLOBAL_HOOKS

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

_DRAWS = "it draws random numbers, and slices would draw others"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST_TRIALS = 3
"""Calls that may answer with an objection which is not final until it is taken for final."""
_EXCHANGES = "what other ranks get, since it exchanges tensors with them"

_Mode = tuple[bool, ...]


class TileProof:
    """Asks one module, once, whether it may run in slices: on a few positions of a call.

    Args:
        dim: The dimension of the sequence.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        # By the mode of the module and its parts: dropout is a reason in training only.
        self._answers: dict[_Mode, str | None] = {}
        self._trials: Counter[tuple[_Mode, str]] = Counter()
        self._compared: dict[_Mode, int] = {}
        """The longest sequence whose slices were compared with the whole."""

    def is_given(self, module: nn.Module) -> bool:
        """Returns whether the module is known to be token-wise in the mode that it is in."""
        return self._answers.get(_mode(module), _DRAWS) is None

    def objection(
        self, unit: Unit, module: nn.Module, forward: Callable[..., Any], call: Call
    ) -> str | None:
        """Returns why a call must run whole, None if it may run in slices.

        Args:
            unit: The unit that the module is, or is a part of.
            module: The module.
            forward: Its forward.
            call: Arguments of the call.
        """
        hooks = _hooks_on_parts(module)
        if hooks is not None:
            return f"{hooks} would see every slice instead of the whole"
        if holds_cache(call):  # which the proof would write to as well
            return "it is given a key/value cache, which slices would fill piece by piece"
        mode = _mode(module)
        if mode not in self._answers:
            found = self._trial(unit, module, forward, call)
            if found is not None and not found.is_final:
                self._trials[mode, found.text] += 1
                if self._trials[mode, found.text] < _MOST_TRIALS:
                    return found.text
            self._answers[mode] = None if found is None else found.text
        return self._answers[mode]

    def objection_at_length(
        self,
        unit: Unit,
        module: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        *,
        num_tiles: int,
        may_be_partial: bool,
    ) -> str | None:
        """Returns why slices do not give what the whole call gives, None if they do.

        Asked of sequences longer than those before.

        Args:
            unit: The unit that the module is, or is a part of.
            module: The module, of which a few positions have no objection.
            forward: Its forward.
            call: Arguments of the call.
            num_tiles: Number of slices.
            may_be_partial: Whether a part of the call will do where memory is short.

        Raises:
            RuntimeError: If there is no memory for it.
        """
        mode, length = _mode(module), sequence_length(*call, dim=self._dim)
        if length <= self._compared.get(mode, 0):
            return None
        with announced_as_replay(), watching_collectives(unit):
            found = objection_at_length(
                module,
                forward,
                call,
                num_tiles=num_tiles,
                dim=self._dim,
                may_be_partial=may_be_partial,
            )
        if found is None:
            self._compared[mode] = length
            return None
        if found.is_final:
            self._answers[mode] = found.text
        return found.text

    def refuse(self, module: nn.Module) -> str:
        """Takes note that it drew random numbers all the same; returns that as an objection."""
        self._answers[_mode(module)] = _DRAWS
        return _DRAWS

    def _trial(
        self, unit: Unit, module: nn.Module, forward: Callable[..., Any], call: Call
    ) -> Objection | None:
        routers = () if unit.routing is None else unit.routing.modules()

        def survey() -> Callable[[], str | None]:
            surroundings = Surroundings(module, call, left_out=routers)
            # (a collective: slices of other lengths would begin another number of them)
            return lambda: surroundings.change() if unit.joint is None else _EXCHANGES

        with announced_as_replay(), watching_collectives(unit):
            return objection_to_tiles(module, *call, dim=self._dim, forward=forward, survey=survey)


def _mode(module: nn.Module) -> _Mode:
    return tuple(part.training for part in module.modules())


def _hooks_on_parts(module: nn.Module) -> str | None:
    """Names hooks that run more than once in slices; those of the module see the whole call."""
    parts = [(name, part) for name, part in module.named_modules() if name]
    for name, part in parts:
        if any(part.__dict__.get(kind) for kind in _HOOKS):
            return f"hooks on its part {name!r}"
    if parts and any(home[kind] for home, kind in GLOBAL_HOOKS):
        return "hooks on all modules"
    return None
