"""What the longest step of a recipe needs on the device that it is meant for."""

from __future__ import annotations

from dataclasses import dataclass

from rematic.cli.plan_command import ROW_OF_START, actions_given, actions_to_plan, budget_of
from rematic.cost import StepProfile, trace_recipe
from rematic.cost.devices import REFERENCE_CPU, Device, gpu_named
from rematic.cost.roofline import pace_of
from rematic.planner import (
    Forecast,
    PolicyForecast,
    StepCosts,
    Terms,
    forecast_step,
    longest_length,
)
from rematic.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class RecipeForecast:
    """The longest step of a recipe under each policy."""

    recipe: Recipe
    """The recipe."""

    device: Device
    """What it is planned for."""

    budget_bytes: int
    """Bytes that may be in use on it."""

    forecast: Forecast
    """The step; its own budget is what plans use of that."""

    profile: StepProfile
    """What steps of other lengths cost."""

    def row(self, policy: str) -> PolicyForecast:
        """Returns the step under one policy, by its name in a forecast."""
        (found,) = [row for row in self.forecast.policies if row.policy == policy]
        return found

    @property
    def own(self) -> PolicyForecast:
        """The step under the policy that the recipe starts with."""
        return self.row(ROW_OF_START.get(self.recipe.policy.start, "planned"))

    def longest(self) -> int:
        """Returns the longest sequence, up to this one, that some plan fits; 0 if none does."""
        found = self.forecast

        def costs_at(length: int) -> StepCosts:
            return self.profile.costs_at(
                batch=found.batch, length=length, padded=_is_padded(self.recipe)
            )

        terms = Terms(
            budget_bytes=found.budget_bytes,
            given=actions_given(self.recipe, costs_at(found.length)),
        )
        pace = pace_of(self.device)
        return longest_length(costs_at, pace, terms, policy="planned", max_length=found.length)

    def tokens_per_second(self, row: PolicyForecast) -> float:
        """Returns the tokens that all devices train in a second of such steps."""
        tokens = self.forecast.batch * self.forecast.length * self.recipe.distributed.devices
        return tokens / row.seconds

    def is_out_of_memory(self, row: PolicyForecast) -> bool:
        """Tells whether a policy needs more than may be in use."""
        return row.peak.total > self.budget_bytes


class Profiles:
    """What steps cost, traced once for recipes that differ in nothing that a trace sees."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], StepProfile] = {}

    def of(self, recipe: Recipe, *, device: Device) -> StepProfile:
        """Returns the profile of batches of a recipe's size, for all lengths of its model."""
        on_accelerator, batch = device.name != "cpu", recipe.data.batch_size
        key = (
            *(on_accelerator, batch, _is_padded(recipe), recipe.data.packing, repr(recipe.model)),
            *(recipe.tuning, recipe.quantization, repr(recipe.training), recipe.distributed),
            *(actions_to_plan(recipe), recipe.policy.units, recipe.policy.tiled_loss),
        )
        if key not in self._known:
            self._known[key] = trace_recipe(
                recipe,
                on_accelerator=on_accelerator,
                batch=batch,
                padded=(_is_padded(recipe),),
                max_length=_longest_of_model(recipe),
                actions=actions_to_plan(recipe),
            )
        return self._known[key]


def forecast_recipe(
    recipe: Recipe, *, device: Device | None = None, profiles: Profiles | None = None
) -> RecipeForecast:
    """Returns the forecast of a batch of the longest sequences, padded if there are several.

    Args:
        recipe: A recipe whose model is written out in it.
        device: What to plan for; None: what the recipe says, and on a CPU one whose speed is
            written down, so that the figures are the same everywhere.
        profiles: Traces to share with other recipes; None to trace this one alone.

    Raises:
        ValueError: The recipe cannot be planned, or names no device.
    """
    device = _device_of(recipe) if device is None else device
    budget_bytes = budget_of(recipe.memory.budget, device)
    batch, length = recipe.data.batch_size, recipe.data.max_length
    profile = (profiles or Profiles()).of(recipe, device=device)
    costs = profile.costs_at(batch=batch, length=length, padded=_is_padded(recipe))
    terms = Terms(
        budget_bytes=int(budget_bytes * (1 - recipe.memory.reserve)),
        given=actions_given(recipe, costs),
    )
    return RecipeForecast(
        recipe=recipe,
        device=device,
        budget_bytes=budget_bytes,
        forecast=forecast_step(costs, pace_of(device), terms),
        profile=profile,
    )


def _longest_of_model(recipe: Recipe) -> int:
    """Returns the positions of the model where its config names them: traces are the same."""
    positions = recipe.model.config.get("max_position_embeddings")
    wanted = recipe.data.max_length
    return max(wanted, positions) if isinstance(positions, int) and positions >= wanted else wanted


def _is_padded(recipe: Recipe) -> bool:
    return recipe.data.batch_size > 1 and not recipe.data.packing


def _device_of(recipe: Recipe) -> Device:
    name = recipe.planned_on.device
    if name is None:
        raise ValueError(
            f"the recipe {recipe.name} names no device to plan for; write planned_on.device, such "
            "as rtx-4090 or cpu"
        )
    return REFERENCE_CPU if name.lower() == "cpu" else gpu_named(name)
