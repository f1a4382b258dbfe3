"""Which units of a model cost the same, and which of them have to be traced."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

_PLAIN = (bool, int, float, str, type(None))
_POSITION_SUFFIXES = ("idx", "index", "layer_id")


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The units that stand for all: of each stack and kind the first two, and the last of all.

    The first one of a kind is apart since it computes what the others share (and frees it last),
    the last one of a stack since what follows it may hold what the others let go.
    """

    positions: tuple[int, ...]
    """Positions of the units that are traced, ascending."""

    of_unit: tuple[int, ...]
    """For each unit the slot (a place in `positions`) that stands for it."""

    @property
    def counts(self) -> tuple[int, ...]:
        """For each slot the number of units for which it stands."""
        return tuple(self.of_unit.count(slot) for slot in range(len(self.positions)))


def choose_slots(units: Sequence[tuple[str, nn.Module]]) -> Slots:
    """Returns the units to trace, given (qualified name, module) of each."""
    kinds = [(_stack_of(name), kind_of(module)) for name, module in units]
    stacks = [stack for stack, _ in kinds]
    last = {stack: position for position, stack in enumerate(stacks)}
    seen: dict[Hashable, list[int]] = {}
    stands_for: list[int] = []
    for position, kind in enumerate(kinds):
        traced = seen.setdefault(kind, [])
        if position == last[kind[0]]:
            stands_for.append(position)
            continue
        if len(traced) < 2:
            traced.append(position)
        stands_for.append(traced[-1])
    positions = tuple(sorted(set(stands_for)))
    return Slots(
        positions=positions,
        of_unit=tuple(positions.index(position) for position in stands_for),
    )


def _stack_of(name: str) -> str:
    return name.rpartition(".")[0]


def _class_of(module: nn.Module) -> type:
    """Returns the class; a parametrized module has one of its own, made for it alone."""
    made = type(module)
    return made.__bases__[0] if parametrize.is_parametrized(module) else made


def kind_of(unit: nn.Module) -> Hashable:
    """Returns what must be equal for two units to cost the same."""
    return tuple(
        (
            path,
            _class_of(module),
            module.training,
            tuple(
                (name, None if p is None else (tuple(p.shape), p.dtype, p.requires_grad))
                for name, p in module._parameters.items()
            ),
            tuple(
                sorted(
                    (name, repr(value))
                    for name, value in vars(module).items()
                    if isinstance(value, _PLAIN) and not name.endswith(_POSITION_SUFFIXES)
                )
            ),
        )
        for path, module in unit.named_modules()
    )
