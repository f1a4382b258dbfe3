"""Assembles a Session: recipe, probe, budget, units, policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rematic.activations import Engine, Notice
from rematic.batch_shape import BatchShape, default_batch_shape
from rematic.budget import refuse_too_small, resolve_budget
from rematic.control import ControlRules, Goals, Pace
from rematic.journal import EventSink, SteadyJournal
from rematic.memory import MemorySnapshot, Probe, make_probe, process_overhead_bytes
from rematic.model_planner import ModelPlanner
from rematic.operator_requests import FILE_NAME as REQUESTS_NAME
from rematic.operator_requests import RequestReader
from rematic.policy import (
    Action,
    Policy,
    Rule,
    Selective,
    Tile,
    action_named,
    lossless,
    policy_named,
)
from rematic.rank_agreement import journal_of_rank
from rematic.recipes import (
    ActionConfig,
    Budget,
    Recipe,
    RuleConfig,
    SelectiveConfig,
    TileConfig,
    load_recipe,
    parse_budget,
    recipe_from_config,
)
from rematic.session import Session
from rematic.session_settings import SessionSettings
from rematic.stash import load_quantization
from rematic.supervisor import LADDER_NAMES, Supervision
from rematic.training_tensors import existing_bytes


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    recipe: str | Path | Recipe | Mapping[str, Any] = "auto",
    budget: int | float | str | None = None,
    policy: str | Policy | None = None,
    probe: str | Probe | None = None,
    batch_shape: Callable[[object], BatchShape] = default_batch_shape,
    journal: EventSink | None = None,
    on_escalation: Callable[[str], None] | None = None,
    device: torch.device | None = None,
) -> Session:
    """Puts rematic onto a model, whose names, types and saved files stay as they are.

    Args:
        model: The model; the blocks of its repeated stacks become units.
        optimizer: The optimizer (or several): a boundary lies after its step, and the step is
            covered by the retry at the op. Without one every step ends at a boundary.
        recipe: `auto`, a recipe's name, a path, a recipe, or a config with a recipe's keys (a
            mapping, or an OmegaConf config as Hydra gives it).
        budget: Bytes that may be in use, weights and optimizer included: an absolute size such as
            `20GiB`, a share of the device such as 0.9, or `auto`; instead of the recipe's. On a
            CPU it must be given.
        policy: A policy or the name of one (`planned`, `keep`, `selective`, `recompute`,
            `recompute+offload`, `offload`, `compress`); instead of the recipe's.
        probe: `auto`, `host`, `cuda`, or a probe; instead of the recipe's.
        batch_shape: Reads a batch; the default takes the largest tensor, integers first.
        journal: Takes the decisions, such as a `rematic.journal.JournalWriter`; an operator's
            requests come through a file beside it. Where several ranks name the same file, one of
            them writes it.
        on_escalation: Called with what a person must decide, if the recipe has
            `control: {escalation: call}`.
        device: Where the model will train, if a wrapper is going to move it there; None for where
            its parameters are.

    Raises:
        ValueError: If there is no unit, a pattern matches nothing, the model is attached already,
            the budget does not hold the model, there is none for a model on the CPU whose policy
            plans, or activations may be compressed and bitsandbytes is not installed.
    """
    chosen = _recipe(recipe)
    journal = journal_of_rank(journal)
    optimizers = _optimizers(optimizer)
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    wanted = policy_named(policy) if policy is not None else policy_of(chosen)
    may_compress = chosen.policy.allow_lossy or wanted.is_lossy
    if may_compress:
        # not in the first step that needs it, nor among the bytes that a probe counts from now on
        load_quantization()
    reader = make_probe(
        chosen.memory.probe if probe is None else probe,
        device=device,
        overhead_bytes=process_overhead_bytes(existing_bytes(model, optimizers)),
    )
    is_tried = wanted.is_lossy and chosen.goals.gradient_tolerance is not None
    first = lossless(wanted) if is_tried else wanted
    supervision = _supervision(chosen, journal, on_escalation)
    if is_tried:
        supervision = replace(supervision, begins_with=wanted)
    budget_bytes = _budget_bytes(
        chosen.memory.budget if budget is None else parse_budget(budget),
        model,
        reader.snapshot(),
        device=device,
        is_planned=first.default is None,
    )
    engine = Engine(
        model,
        chosen.policy.units,
        scratch_dir=chosen.memory.scratch_dir,
        trust=chosen.policy.trust,
        routers=chosen.policy.routers,
    )
    try:
        session = Session(
            model,
            engine,
            reader,
            optimizers=optimizers,
            policy=first,
            settings=SessionSettings(
                budget_bytes=budget_bytes,
                reserve=chosen.memory.reserve,
                op_retry=chosen.policy.op_retry,
                batch_shape=batch_shape,
                journal=SteadyJournal(_NoJournal() if journal is None else journal),
                allow_lossy=may_compress,
                allow_tile=chosen.policy.allow_tile,
                attempts=chosen.control.attempts,
                allow_split=chosen.control.allow_split,
                supervision=supervision,
            ),
            model_planner=_model_planner(model, engine, chosen),
        )
    except BaseException:
        engine.detach()
        raise
    if chosen.policy.tiled_loss == "always":
        _tile_the_loss(session)
    return session


def _model_planner(model: nn.Module, engine: Engine, recipe: Recipe) -> ModelPlanner | None:
    if recipe.policy.planner == "measured":
        return None
    return ModelPlanner(
        model,
        engine,
        patterns=recipe.policy.units,
        may_move=recipe.memory.scratch_dir is not None,
        notify=engine.ledger.tell,
    )


def _tile_the_loss(session: Session) -> None:
    from rematic.hosts.transformers_loss import use_tiled_loss  # needs transformers

    try:
        switch = use_tiled_loss(session.model)
    except BaseException:
        session.detach()
        raise
    session.at_detach.append(switch.remove)
    session.write_notice(
        Notice(
            unit=switch.name,
            kind="tiled_loss",
            text="head and loss run in slices: their gradients are summed by slice",
        )
    )


def _supervision(
    recipe: Recipe, journal: EventSink | None, on_escalation: Callable[[str], None] | None
) -> Supervision:
    said = recipe.control
    path = getattr(journal, "path", None)
    return Supervision(
        rules=ControlRules(
            goals=Goals(**vars(recipe.goals)),
            pace=Pace(
                probation_steps=said.probation_steps,
                cool_down_steps=said.cool_down_steps,
                window_steps=said.window_steps,
            ),
            ladder=LADDER_NAMES,
            adapt=said.adapt,
        ),
        escalation=said.escalation,
        on_escalation=on_escalation,
        requests=None if path is None else RequestReader(Path(path).with_name(REQUESTS_NAME)),
    )


class _NoJournal:
    def write(self, event: Mapping[str, object]) -> None:
        """Takes nothing down."""


def _recipe(recipe: str | Path | Recipe | Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return recipe_from_config(recipe)
    return Recipe() if recipe == "auto" else load_recipe(recipe)


def _budget_bytes(
    budget: Budget,
    model: nn.Module,
    snapshot: MemorySnapshot,
    *,
    device: torch.device,
    is_planned: bool,
) -> int | None:
    budget_bytes = resolve_budget(budget, snapshot=snapshot, device=device)
    if budget_bytes is not None:
        tensors = (*model.parameters(), *model.buffers())
        refuse_too_small(budget_bytes, [tensor for tensor in tensors if tensor.device == device])
    elif device.type == "cpu" and is_planned:
        raise ValueError(
            "no budget for a model on the CPU: expected one, since other programs use the same "
            "memory. Write for example `budget='8GiB'` (in the call, the strategy or the recipe's "
            "`memory`), or take a fixed policy such as `policy='recompute'`."
        )
    return budget_bytes


def _optimizers(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def policy_of(recipe: Recipe) -> Policy:
    """Returns the policy that a recipe starts with, its rules included."""
    start = policy_named(recipe.policy.start)
    rules = tuple(_rule(rule) for rule in recipe.policy.rules)
    return Policy(name=start.name, rules=rules, default=start.default)


def _rule(rule: RuleConfig) -> Rule:
    return Rule(
        pattern=rule.match,
        action=_action(rule.action),
        exclude=rule.exclude,
        first=rule.first,
        last=rule.last,
        every=rule.every,
        share=_pair(rule.share),
        span=_pair(rule.span),
    )


def _action(action: ActionConfig) -> Action:
    if isinstance(action, SelectiveConfig) and action.save:
        return Selective(save=action.save)
    if isinstance(action, TileConfig):
        return Tile(tile_tokens=action.tile_tokens, num_tiles=action.num_tiles, dim=action.dim)
    return action_named(action.name)


def _pair(values: tuple[int, ...] | None) -> tuple[int, int] | None:
    return None if values is None else (values[0], values[1])
