"""Ways of tuning a model, from the most to the least memory, and the first that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rematic.cli.plan_command import budget_of
from rematic.cli.recipe_forecast import RecipeForecast, forecast_recipe
from rematic.cost.devices import GPUS, Device
from rematic.recipes import (
    AdamWConfig,
    Budget,
    DataConfig,
    FiguresConfig,
    GoalsConfig,
    MemoryConfig,
    ModelConfig,
    QuantizationConfig,
    Recipe,
    TrainingConfig,
    TuningConfig,
)
from rematic.recipes.model_schema import WeightsDtype
from rematic.recipes.tuning_schema import Method

GPU_RESERVE = 0.06
"""Share of the budget that is left for the context of a GPU and for fragments."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a recipe is to do."""

    model: ModelConfig
    """The model, written out."""

    device: Device
    """Where it is trained."""

    budget: Budget
    """What may be in use there."""

    length: int
    """Longest sequence, in tokens."""

    method: Method | None
    """Way of tuning; None for the first that fits."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is one of the catalogue."""
        return self.device.name != "cpu"


def first_that_fits(wish: Wish) -> tuple[RecipeForecast | None, list[RecipeForecast]]:
    """Returns the first way that fits, None if none does, and all that were planned."""
    planned = []
    for recipe in recipes_for(wish):
        forecast = forecast_recipe(recipe, device=wish.device)
        planned.append(forecast)
        if forecast.own.fits:
            return forecast, planned
    return None, planned


def recipes_for(wish: Wish) -> Iterator[Recipe]:
    """The ways of tuning, those that need the most memory first."""
    for way in _ways_on_gpu() if wish.is_on_gpu else _ways_on_cpu():
        if wish.method in (None, way.method):
            yield _recipe(wish, way)


def device_that_fits(forecast: RecipeForecast) -> Device | None:
    """Returns the smallest GPU of the catalogue with room for the lowest peak; None if none has."""
    memory = forecast.recipe.memory
    for gpu in sorted(GPUS, key=lambda gpu: gpu.memory_bytes or 0):
        usable = budget_of(Budget(), gpu) * (1 - memory.reserve)
        if forecast.own.peak.total <= usable:
            return gpu
    return None


@dataclass(frozen=True, kw_only=True)
class _Way:
    """One way of tuning."""

    method: Method
    dtype: WeightsDtype
    training: TrainingConfig
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)


def _ways_on_gpu() -> Sequence[_Way]:
    sloping = TrainingConfig(learning_rate=2e-5, schedule="cosine", warmup_steps=30, accumulate=8)
    in_8_bits = replace(sloping, optimizer=AdamWConfig(name="paged-adamw-8bit"))
    mixed = replace(sloping, precision="bf16")
    adapter = replace(sloping, learning_rate=1e-4, weight_decay=0.0)
    packed = replace(in_8_bits, learning_rate=1e-4, weight_decay=0.0)
    return (
        _Way(method="full", dtype="fp32", training=mixed),
        _Way(method="full", dtype="bf16", training=in_8_bits),
        _Way(method="lora", dtype="bf16", training=adapter),
        _Way(method="qlora", dtype="bf16", training=packed),
    )


def _ways_on_cpu() -> Sequence[_Way]:
    adapter = TrainingConfig(learning_rate=1e-3, weight_decay=0.0)
    packed = QuantizationConfig(compute_dtype="fp32")
    return (
        _Way(method="full", dtype="fp32", training=TrainingConfig()),
        _Way(method="lora", dtype="fp32", training=adapter),
        _Way(method="qlora", dtype="fp32", training=adapter, quantization=packed),
    )


def _recipe(wish: Wish, way: _Way) -> Recipe:
    source = wish.model.id or wish.model.path or wish.model.type or "model"
    if wish.model.path is not None:
        source = Path(wish.model.path).expanduser().resolve().name
    return Recipe(
        name=_name(source, f"-{way.method}-{length_text(wish.length)}-{wish.device.name}"),
        description=f"{way.method} of {source}, sequences of up to {wish.length:,} tokens",
        model=replace(wish.model, dtype=way.dtype),
        tuning=TuningConfig(method=way.method),
        quantization=way.quantization,
        data=DataConfig(max_length=wish.length),
        training=way.training,
        memory=MemoryConfig(budget=wish.budget, reserve=GPU_RESERVE if wish.is_on_gpu else 0.05),
        goals=GoalsConfig(headroom_min=0.03, slowdown_max=1.5),
        planned_on=FiguresConfig(device=wish.device.name),
    )


def _name(source: str, rest: str) -> str:
    """What a folder can be called, too."""
    stem = re.sub(r"[^\w .+-]+", "-", source.rpartition("/")[2].lower()).lstrip(" .+-")
    return f"{(stem or 'model')[: 100 - len(rest)]}{rest}"


def length_text(length: int) -> str:
    """Writes tokens as people do: 32k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
