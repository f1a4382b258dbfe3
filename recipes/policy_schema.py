"""What a recipe says of activations: the policy at the start, and the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rematic.recipes.action_schema import ActionConfig
from rematic.recipes.field_checks import (
    instance,
    instances,
    one_of,
    require,
    some_text,
    true_or_false,
    whole_number,
)

Start: TypeAlias = Literal[
    "planned", "keep", "selective", "recompute", "recompute+offload", "offload", "compress"
]
Planner: TypeAlias = Literal["auto", "measured"]
OpRetry: TypeAlias = Literal["auto", "always", "never"]
TiledLoss: TypeAlias = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """One rule: the units it speaks of, and what happens to them."""

    match: str
    """Pattern over qualified module names and class names; has no default."""
    action: ActionConfig
    """What happens to the activations of those units; has no default."""
    exclude: tuple[str, ...] = ()
    """Patterns of units that are left out; default none."""
    first: int | None = None
    """Only so many of those units from the first on; None (default): no limit."""
    last: int | None = None
    """Only so many of those units up to the last; None (default): no limit."""
    every: int | None = None
    """Only every so-manieth of those units, the first included; None (default): each."""
    share: tuple[int, ...] | None = None
    """Only m of every n of those units, as [m, n]; None (default): all."""
    span: tuple[int, ...] | None = None
    """Only those units from one position to before another, as [start, stop] from 0."""

    def __post_init__(self) -> None:
        some_text(self, "match", remedy="write a pattern such as 'model.layers.*'")
        instance(self, "action", kind=get_args(ActionConfig), remedy="write RecomputeConfig()")
        instances(self, "exclude", kind=str, remedy="write patterns such as ['model.layers.0']")
        for name in ("first", "last", "every"):
            whole_number(self, name, minimum=1, optional=True, remedy="write null for no limit")
        for name in ("share", "span"):
            pair = getattr(self, name)
            two = pair is None or (len(pair) == 2 and all(type(n) is int for n in pair))
            require(self, name, two, expected="two whole numbers", remedy="write [5, 6] or null")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What happens to activations at the start, and what may never change."""

    start: Start = "planned"
    """Policy at the start; `planned` (default): a plan per micro-batch within the budget."""
    units: tuple[str, ...] = ()
    """Patterns that name the units; empty (default): the blocks of every repeated stack."""
    rules: tuple[RuleConfig, ...] = ()
    """Rules in order, for units that must not follow `start`; default none."""
    trust: tuple[str, ...] = ()
    """Patterns of units whose replay is not checked on the first batch; default none."""
    routers: tuple[str, ...] = ()
    """Patterns of routers, whose decisions replays keep; empty (default): those known by name."""
    planner: Planner = "auto"
    """What `planned` plans by; `auto` (default): a model of the step where one can be traced."""
    op_retry: OpRetry = "auto"
    """When a failed op is run again; `auto` (default): on steps that are predicted risky."""
    allow_lossy: bool = False
    """Whether actions that lose precision may be chosen where no rule names them."""
    allow_tile: bool = False
    """Whether the last attempts at a batch may run MLPs, norms and the like in slices."""
    tiled_loss: TiledLoss = "auto"
    """Whether head and loss run in slices; `auto`: `rematic train` does over large vocabularies."""

    def __post_init__(self) -> None:
        one_of(self, "start", choices=get_args(Start), remedy="write planned where unsure")
        instances(self, "units", kind=str, remedy="write patterns such as ['model.layers.*']")
        require(
            self,
            "units",
            all(pattern.strip() for pattern in self.units),
            expected="patterns that are not blank",
            remedy="write each as text such as 'model.layers.*', or leave the list empty",
        )
        instances(
            self, "rules", kind=RuleConfig, remedy="write (RuleConfig(match=..., action=...),)"
        )
        instances(self, "trust", kind=str, remedy="write patterns such as ['model.layers.0']")
        instances(self, "routers", kind=str, remedy="write patterns such as ['*.mlp.gate']")
        one_of(self, "planner", choices=get_args(Planner), remedy="write auto where unsure")
        one_of(self, "op_retry", choices=get_args(OpRetry), remedy="write auto where unsure")
        true_or_false(self, "allow_lossy")
        true_or_false(self, "allow_tile")
        require(
            self,
            "start",
            self.start != "compress" or self.allow_lossy,
            expected="a lossless policy, since allow_lossy is false",
            remedy="write allow_lossy: true, or name compress in a rule",
        )
        one_of(self, "tiled_loss", choices=get_args(TiledLoss), remedy="write auto where unsure")
