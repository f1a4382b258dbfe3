"""`rematic plan RECIPE`: what fits, before anything runs."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rematic.byte_sizes import format_bytes
from rematic.cli.exit_codes import DONE
from rematic.recipes import Budget, Recipe, load_recipe, parse_budget

if TYPE_CHECKING:
    from rematic.cli.plan_report import PlanReport
    from rematic.cost.devices import Device
    from rematic.planner import StepCosts
    from rematic.policy import Action

ROW_OF_START = {
    "planned": "planned",
    "keep": "keep all",
    "selective": "op list",
    "recompute": "recompute all",
}
"""Rows of a forecast that are what a recipe starts with; the others are given to `planned`."""


MOST = 2**31 - 1
"""Most tokens of a sequence, and sequences of a batch, that are planned."""


def run_plan(arguments: argparse.Namespace) -> int:
    """Prints, per length, what a step needs and takes under each policy.

    Raises:
        ValueError: The recipe, the device, the budget or a length cannot be used.
    """
    factory = arguments.recipe if _is_factory(arguments.recipe) else None
    recipe = load_recipe("auto" if factory else arguments.recipe, arguments.overrides)
    if factory is not None:
        _refuse_unread(recipe, factory)
    lengths = parse_lengths(arguments.lengths, longest=recipe.data.max_length)
    budget = recipe.memory.budget if arguments.budget is None else parse_budget(arguments.budget)
    plot = None if arguments.plot is None else _plot_path(arguments.plot)
    if arguments.batch is not None and not 1 <= arguments.batch <= MOST:
        raise ValueError(
            f"--batch is {arguments.batch}; expected a number of sequences from 1 to {MOST}"
        )
    with _without_collections():
        # Only now what takes seconds to import.
        from rematic.cli.plan_plot import draw
        from rematic.cli.plan_report import format_plan

        report = _plan(recipe, arguments, lengths=lengths, budget=budget, factory=factory)
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else format_plan(report))
    if plot is not None:
        _write_plot(plot, draw(report.forecasts[-1]))
    return DONE


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Leaves the collector of cycles off in the body, and when the process ends.

    It would look at all that is imported and traced again and again: a third of the command's time.
    """
    was_on = gc.isenabled()
    gc.disable()
    atexit.unregister(gc.freeze)  # once is enough
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _plan(
    recipe: Recipe,
    arguments: argparse.Namespace,
    *,
    lengths: Sequence[int],
    budget: Budget,
    factory: str | None,
) -> PlanReport:
    """Traces the recipe's model and judges every policy at every length."""
    from rematic.cli.plan_report import PlanReport, usable_bytes_of
    from rematic.cost import trace_recipe
    from rematic.cost.factory_profile import trace_factory
    from rematic.cost.roofline import pace_of
    from rematic.planner import POLICIES, Terms, forecast_step, longest_length

    device = _device(arguments.device or recipe.planned_on.device)
    budget_bytes = budget_of(budget, device)
    usable_bytes = usable_bytes_of(budget_bytes, recipe.memory.reserve)
    positions = None if factory is not None else _positions_of(recipe)
    limit = max(lengths)
    if arguments.lengths is not None:
        _check_lengths(limit, positions=positions)
    if arguments.max_length:
        limit = 4 * limit if positions is None else max(limit, positions)
    batch, padded = arguments.batch or recipe.data.batch_size, arguments.padded
    trace = trace_recipe if factory is None else functools.partial(trace_factory, factory)
    profile = trace(
        recipe,
        on_accelerator=device.name != "cpu",
        batch=batch,
        padded=(padded,),
        max_length=limit,
        actions=actions_to_plan(recipe),
    )
    pace = pace_of(device)

    def costs_at(length: int) -> StepCosts:
        return profile.costs_at(batch=batch, length=length, padded=padded)

    terms = Terms(budget_bytes=usable_bytes, given=actions_given(recipe, costs_at(min(lengths))))

    def longest(policy: str) -> int:
        return longest_length(costs_at, pace, terms, policy=policy, max_length=limit)

    return PlanReport(
        recipe=factory or recipe.name,
        device=device,
        budget_bytes=budget_bytes,
        reserve=recipe.memory.reserve,
        forecasts=tuple(forecast_step(costs_at(length), pace, terms) for length in lengths),
        longest={policy: longest(policy) for policy in POLICIES} if arguments.max_length else None,
        longest_limit=limit,
        notes=_notes(recipe, device, budget_bytes),
    )


def _is_factory(name: str) -> bool:
    """Returns whether an argument is an import path such as `package.module:name`."""
    module, colon, attribute = name.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def _refuse_unread(recipe: Recipe, factory: str) -> None:
    """Refuses what would have no effect on a model that a factory makes."""
    written = load_recipe("auto")
    for section in ("model", "tuning", "quantization"):
        if getattr(recipe, section) != getattr(written, section):
            raise ValueError(
                f"{section} says how the model of a recipe is made, and {factory} makes its own; "
                f"expected nothing of it: remove what replaces values of {section}"
            )


def parse_lengths(text: str | None, *, longest: int) -> list[int]:
    """Reads lengths such as `4k,8k,32768`; without any: a quarter, a half and all of the longest.

    Raises:
        ValueError: One of them is no length.
    """
    if text is None:
        return sorted({max(2, longest // 4), max(2, longest // 2), longest})
    lengths = [_length(part.strip()) for part in text.split(",")]
    return sorted(set(lengths))


def _length(text: str) -> int:
    digits, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    length = int(digits) * factor if digits.isdecimal() and len(digits) < 20 else 0
    if not 2 <= length <= MOST:
        raise ValueError(
            f"the length {text!r} cannot be read; expected tokens, 2 to {MOST}, such as 4096 or 4k"
        )
    return length


def budget_of(budget: Budget, device: Device) -> int:
    """Returns the bytes of a budget on a device.

    Raises:
        ValueError: It is a share of a memory whose size is not known.
    """
    if budget.kind == "absolute":
        return int(budget.value or 0)
    if device.memory_bytes is None:
        raise ValueError(
            f"the budget is {budget}, a share of the device, but the memory of a CPU is also for "
            "others; expected a size: add --budget 8GiB, or name a GPU by --device"
        )
    from rematic.budget import AUTO_SHARE

    share = AUTO_SHARE if budget.value is None else float(budget.value)
    return int(share * device.memory_bytes)


def _device(name: str | None) -> Device:
    from rematic.cost.devices import gpu_like, gpu_named

    if name is not None and name.lower() != "cpu":
        return gpu_named(name)
    import torch

    if name is None and torch.cuda.is_available():
        return gpu_like(torch.cuda.get_device_name())
    from rematic.cost.calibrate import local_cpu

    return local_cpu()


def _positions_of(recipe: Recipe) -> int | None:
    """Returns how many tokens the model has positions for; None where its config does not say."""
    from rematic.training.model_config import build_config

    config = build_config(recipe.model, max_length=1).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _check_lengths(longest: int, *, positions: int | None) -> None:
    if positions is not None and longest > positions:
        raise ValueError(
            f"--lengths asks for {longest} tokens, but the model has positions for {positions}; "
            f"expected at most that: write --lengths {positions}, or raise "
            "model.config.max_position_embeddings"
        )


def actions_to_plan(recipe: Recipe) -> tuple[Action, ...]:
    """Returns the actions to trace: those that move tensors only where the recipe names a place.

    A running session asks the same of the recipe. `offload`, which moves far more than the inputs
    of blocks, and `compress`, which is lossy, are traced only where the recipe names them.
    """
    from rematic.policy import Compress, Keep, Offload, Recompute, RecomputeOffload

    named = {recipe.policy.start, *(rule.action.name for rule in recipe.policy.rules)}
    actions: list[Action] = [Keep(), Recompute()]
    if recipe.memory.scratch_dir is not None or "recompute+offload" in named:
        actions.append(RecomputeOffload())
    if "offload" in named:
        actions.append(Offload())
    if "compress" in named:
        actions.append(Compress())
    return tuple(actions)


def actions_given(recipe: Recipe, costs: StepCosts) -> tuple[Action | None, ...] | None:
    """Returns the action that the recipe gives each unit, None where it leaves a choice.

    It does by rules, and by a policy to start with that is no row of a forecast.
    """
    has_own_row = recipe.policy.start in ROW_OF_START
    if has_own_row and not recipe.policy.rules:
        return None
    from rematic.attachment import policy_of
    from rematic.policy import resolve

    # A unit that stands for others is called by its class and its position.
    classes = [unit.name.partition(" (as unit ")[0] for unit in costs.classes]
    of_unit = (classes[slot] for slot in costs.unit_classes)
    policy = policy_of(recipe)
    rules = replace(policy, default=None) if has_own_row else policy
    return resolve(rules, dict(zip(costs.unit_names, of_unit, strict=True)))


def _notes(recipe: Recipe, device: Device, budget_bytes: int) -> tuple[str, ...]:
    notes = []
    if device.memory_bytes is not None and budget_bytes > device.memory_bytes:
        notes.append(
            f"the budget is more than the {format_bytes(device.memory_bytes)} of {device.name}, so "
            "what fits into it need not fit there: expected less, such as --budget auto"
        )
    processes = recipe.distributed
    if processes.devices > 1:
        notes.append(
            f"figures are those of each of {processes.devices} devices ({processes.strategy})"
        )
    if recipe.policy.rules:
        notes.append("only the row `planned` follows the rules of the recipe (policy.rules)")
    if recipe.policy.start not in ROW_OF_START:
        notes.append(
            f"the row `planned` is {recipe.policy.start}, with which the recipe starts "
            "(policy.start)"
        )
    return tuple(notes)


def _plot_path(written: str) -> Path:
    path = Path(written)
    problem = None
    if not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif path.is_dir():
        problem = "it is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "nobody here may write there"
    if problem is not None:
        raise ValueError(_cannot_write(path, problem))
    if path.suffix.lower() != ".svg":
        raise ValueError(f"the plot {path} would be an SVG drawing; expected a name ending in .svg")
    return path


def _write_plot(path: Path, drawn: str) -> None:
    try:
        path.write_text(drawn, "utf-8")
    except OSError as error:
        raise ValueError(_cannot_write(path, str(error))) from error


def _cannot_write(path: Path, problem: str) -> str:
    return (
        f"the plot {path} cannot be written: {problem}; expected a file in a folder that exists "
        "and can be written to"
    )
