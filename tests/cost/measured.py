"""The exact ledger of a real step, and the peak predicted for the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rematic.activations import Engine
from rematic.memory import SimulatedProbe
from rematic.planner import Option, Peak, Problem, StepCosts, peak_of
from rematic.policy import Action, Keep, Plan, Selective


class RealStep:
    """Steps of a real model under plans; their peak is counted by live storages."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, torch.Tensor],
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.autocast = autocast
        self.engine = Engine(model, trust=["*"])
        for action in (Keep(), Selective()):  # the first calls teach the units something
            self.peak_bytes(batch, [action] * len(self.engine.units))

    def peak_bytes(self, batch: Mapping[str, torch.Tensor], actions: Sequence[Action]) -> int:
        """Returns the peak beyond weights and batch, gradients not existing before."""
        self.engine.apply(Plan(actions=tuple(actions)))
        self.model.zero_grad(set_to_none=True)
        probe = SimulatedProbe()
        probe.track([*self.model.parameters(), *self.model.buffers(), *batch.values()])
        before = probe.allocated_bytes()
        with probe:
            dtype = self.autocast or torch.bfloat16
            with torch.autocast("cpu", dtype=dtype, enabled=self.autocast is not None):
                loss = self.model(**batch).loss
            loss.backward()
        return probe.peak_allocated_bytes - before


def predicted_peak(costs: StepCosts, actions: Sequence[Action]) -> Peak:
    """Returns the peak by the formula of the planner, every unit having the one action."""
    units = []
    for action, position in zip(actions, costs.unit_classes, strict=True):
        measured = dict(costs.classes[position].actions)[action.name]
        option = Option(
            action=action,
            kept_bytes=measured.kept,
            forward_bytes=measured.forward,
            backward_bytes=measured.backward,
            gradient_bytes=measured.gradient,
            moved_bytes=measured.moved,
            cast_bytes=measured.cast,
            late_bytes=measured.late,
            seconds=0.0,
        )
        units.append((option,))
    problem = Problem(fixed=costs.fixed, around=costs.around, units=tuple(units))
    return peak_of(problem, [0] * len(units))
