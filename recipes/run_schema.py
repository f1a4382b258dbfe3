"""What a recipe says of the devices, their memory, and where a run is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rematic.recipes.budget import Budget
from rematic.recipes.field_checks import (
    folder_name,
    instance,
    number_from_zero,
    one_of,
    require,
    some_text,
    true_or_false,
    whole_number,
)

ProbeKind: TypeAlias = Literal["auto", "host", "cuda", "simulated"]
Ranks: TypeAlias = Literal["single", "ddp", "fsdp2"]
Saved: TypeAlias = Literal["auto", "none", "adapter", "merged", "adapter+merged", "full"]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The memory a run may use, and how it is measured."""

    budget: Budget = field(default_factory=Budget)
    """Bytes, a size, a fraction of the device, or `auto` (default; a CPU run must give one)."""
    probe: ProbeKind = "auto"
    """Which memory is measured; `auto` (default): that of the model's device."""
    heap_cap: bool = False
    """Whether the runner caps the heap of a CPU run at the budget; default false."""
    scratch_dir: str | None = None
    """Folder for tensors that move to disk; None (default): the system's temporary one."""
    reserve: float = 0.05
    """Fraction of the budget that plans leave unused, at least 0 and below 1; default 0.05."""

    def __post_init__(self) -> None:
        instance(self, "budget", kind=Budget, remedy="make one by parse_budget('700MiB')")
        one_of(self, "probe", choices=get_args(ProbeKind), remedy="write auto where unsure")
        true_or_false(self, "heap_cap")
        some_text(self, "scratch_dir", optional=True, remedy="write a folder on a fast disk")
        require(
            self,
            "heap_cap",
            not self.heap_cap or self.probe in ("auto", "host"),
            expected=f"false, since probe is {self.probe} and only the heap of a CPU has a cap",
            remedy="write heap_cap: false, or probe: host",
        )
        number_from_zero(self, "reserve", below=1, remedy="write a fraction such as 0.05")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes that train together, one for each device."""

    strategy: Ranks = "single"
    """`single` (default), `ddp` (each process has the whole model) or `fsdp2` (it is sharded)."""
    devices: int = 1
    """Processes, each with a device of its own; default 1."""

    def __post_init__(self) -> None:
        one_of(self, "strategy", choices=get_args(Ranks), remedy="write single for one device")
        whole_number(self, "devices", minimum=1, remedy="write 1 for one device")
        require(
            self,
            "devices",
            (self.strategy == "single") == (self.devices == 1),
            expected="1 for the strategy single, and 2 or more for the others",
            remedy=f"write both, such as strategy: ddp, devices: {max(self.devices, 2)}",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run is written, and how often it is saved."""

    dir: str = "runs"
    """Folder that holds the runs, relative to the working directory; default `runs`."""
    name: str | None = None
    """Name of the run's own folder; None (default): the name of the recipe."""
    checkpoint_every_steps: int | None = None
    """Optimizer steps between checkpoints; None (default): one at the end."""
    save: Saved = "auto"
    """Weights saved at the end as safetensors; `auto` (default): the adapter, or all of `full`."""

    def __post_init__(self) -> None:
        some_text(self, "dir", remedy="write a folder such as runs")
        folder_name(self, "name", optional=True)
        whole_number(
            self,
            "checkpoint_every_steps",
            minimum=1,
            optional=True,
            remedy="write null for one checkpoint at the end",
        )
        one_of(self, "save", choices=get_args(Saved), remedy="write auto where unsure")
