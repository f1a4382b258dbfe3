"""What a recipe can say.

Every class is one section; every field has a default unless its docstring says otherwise, so a
recipe holds only what differs. A new action is one more class with a `name` of its own, added to
`ActionConfig`; the loader picks the class by that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rematic.recipes.budget import Budget
from rematic.recipes.control_schema import ControlConfig as ControlConfig
from rematic.recipes.control_schema import GoalsConfig as GoalsConfig
from rematic.recipes.field_checks import (
    folder_name,
    instance,
    instances,
    number_from_zero,
    one_of,
    plain_mapping,
    positive_number,
    require,
    some_text,
    true_or_false,
    whole_number,
)

Precision: TypeAlias = Literal["fp32", "bf16"]
ProbeKind: TypeAlias = Literal["auto", "host", "cuda", "simulated"]
Start: TypeAlias = Literal[
    "planned", "keep", "selective", "recompute", "recompute+offload", "offload", "compress"
]
Planner: TypeAlias = Literal["auto", "measured"]
OpRetry: TypeAlias = Literal["auto", "always", "never"]

_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model written out in the recipe, with random weights."""

    type: str | None = None
    """Model type as transformers names it, such as `llama`; None (default): no model."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Keys of the config class of that type, plain values; default: its own defaults."""

    def __post_init__(self) -> None:
        some_text(self, "type", optional=True, remedy="write a model type such as llama")
        plain_mapping(self, "config")
        require(
            self,
            "config",
            self.type is not None or not self.config,
            expected="no keys, since there is no type whose keys they could be",
            remedy="name the type, such as type: llama, or remove config",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The documents to train on; each is one sequence."""

    source: str = "pydoc_topics"
    """`pydoc_topics` (default: the standard library's texts), or a path to .txt or .jsonl files."""
    text_field: str = "text"
    """Key that holds the text in each line of a .jsonl file; default `text`."""
    max_length: int = 1024
    """Longest sequence in tokens, at least 2; a longer document is cut. Default 1024."""
    max_documents: int | None = None
    """How many documents to use, from the first; None (default): all."""
    shuffle: bool = True
    """Whether each epoch has its own order, drawn from training.seed; default true."""

    def __post_init__(self) -> None:
        some_text(self, "source", remedy="write pydoc_topics or a path to .txt or .jsonl files")
        some_text(self, "text_field", remedy="name the key that holds the text, such as text")
        whole_number(self, "max_length", minimum=2, remedy="write the longest sequence in tokens")
        whole_number(
            self, "max_documents", minimum=1, optional=True, remedy="write null for all documents"
        )
        true_or_false(self, "shuffle")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the model is trained."""

    epochs: int = 1
    """Times each document is seen; default 1."""
    max_steps: int | None = None
    """Optimizer steps after which training ends; None (default): by epochs alone."""
    learning_rate: float = 3.0e-4
    """Learning rate of AdamW after warm-up; default 3.0e-4."""
    weight_decay: float = 0.01
    """Weight decay of AdamW; default 0.01."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0; default 0."""
    clip_norm: float | None = 1.0
    """Largest norm of all gradients together; None: no clipping. Default 1.0."""
    accumulate: int = 1
    """Micro-batches per optimizer step; default 1."""
    precision: Precision = "fp32"
    """`fp32` (default), or `bf16`: autocast to bfloat16 over fp32 weights."""
    seed: int = 0
    """Seed of weights, order of documents and dropout, 0 to 2**32 - 1; default 0."""
    threads: int | None = None
    """CPU threads of torch; None (default): torch's own choice."""

    def __post_init__(self) -> None:
        whole_number(self, "epochs", minimum=1, remedy="write max_steps for less than one epoch")
        whole_number(
            self, "max_steps", minimum=1, optional=True, remedy="write null to end by epochs"
        )
        positive_number(self, "learning_rate", remedy="write for example 3.0e-4")
        number_from_zero(self, "weight_decay", remedy="write 0 for none")
        whole_number(self, "warmup_steps", minimum=0, remedy="write 0 for none")
        positive_number(self, "clip_norm", optional=True, remedy="write null for none")
        whole_number(
            self, "accumulate", minimum=1, remedy="write 1 for a step after each micro-batch"
        )
        one_of(self, "precision", choices=get_args(Precision), remedy="write fp32 where unsure")
        whole_number(self, "seed", minimum=0, maximum=_MAX_SEED, remedy="write for example 0")
        whole_number(
            self, "threads", minimum=1, optional=True, remedy="write null for torch's own choice"
        )


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
class KeepConfig:
    """Activations stay in memory until they are evicted."""

    name: Literal["keep"] = "keep"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class SelectiveConfig:
    """The results of chosen ops stay in memory, the rest is computed again in backward."""

    name: Literal["selective"] = "selective"
    """Tells the action from the others."""
    save: tuple[str, ...] = ()
    """Ops whose results stay, such as matmul or attention; empty (default): the expensive ones."""

    def __post_init__(self) -> None:
        instances(self, "save", kind=str, remedy="write names of ops such as [matmul, attention]")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activations are dropped in forward and computed again in backward."""

    name: Literal["recompute"] = "recompute"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class RecomputeOffloadConfig:
    """As recompute, and the inputs of the units move to host memory or disk until then."""

    name: Literal["recompute+offload"] = "recompute+offload"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Activations move to host memory, then to disk (on a CPU at once to disk)."""

    name: Literal["offload"] = "offload"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """Activations are kept in 8 bits, which is lossy; needs bitsandbytes."""

    name: Literal["compress"] = "compress"
    """Tells the action from the others."""


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """A token-wise module runs in slices of the sequence, which are recomputed in backward."""

    name: Literal["tile"] = "tile"
    """Tells the action from the others."""
    tile_tokens: int | None = None
    """Positions in a slice; None (default): 2048, or as num_tiles says."""
    num_tiles: int | None = None
    """Number of slices; None (default): as tile_tokens says."""
    dim: int = 1
    """Dimension of the sequence in every tensor, from the end if negative; default 1."""

    def __post_init__(self) -> None:
        whole_number(self, "tile_tokens", minimum=1, optional=True, remedy="write null for 2048")
        whole_number(
            self, "num_tiles", minimum=1, optional=True, remedy="write null to go by tile_tokens"
        )
        whole_number(self, "dim", minimum=-8, maximum=7, remedy="write 1 for (batch, seq, dim)")
        require(
            self,
            "num_tiles",
            self.tile_tokens is None or self.num_tiles is None,
            expected=f"null, since tile_tokens is {self.tile_tokens}",
            remedy="remove one of the two",
        )


ActionConfig: TypeAlias = (
    KeepConfig
    | SelectiveConfig
    | RecomputeConfig
    | RecomputeOffloadConfig
    | OffloadConfig
    | CompressConfig
    | TileConfig
)
"""What can happen to a unit's activations; a recipe may write `action: keep` for the name alone."""


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
    tiled_loss: bool = False
    """Whether head and loss of a causal language model of transformers run in slices."""

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
        require(
            self,
            "start",
            self.start != "compress" or self.allow_lossy,
            expected="a lossless policy, since allow_lossy is false",
            remedy="write allow_lossy: true, or name compress in a rule",
        )
        true_or_false(self, "tiled_loss")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run is written, and how often it is saved."""

    dir: str = "runs"
    """Folder that holds the runs, relative to the working directory; default `runs`."""
    name: str | None = None
    """Name of the run's own folder; None (default): the name of the recipe."""
    checkpoint_every_steps: int | None = None
    """Optimizer steps between checkpoints; None (default): one at the end."""

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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe; without arguments it is what `auto` means."""

    name: str = "auto"
    """Names the recipe and, without run.name, its runs; a file's default is the file's own name."""
    description: str = ""
    """What the recipe is for, in one line; default empty."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to build."""
    data: DataConfig = field(default_factory=DataConfig)
    """The documents to train on."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How the model is trained."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The memory the run may use."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """What happens to activations."""
    control: ControlConfig = field(default_factory=ControlConfig)
    """How failures are answered, and how fast policies may change."""
    goals: GoalsConfig = field(default_factory=GoalsConfig)
    """What a change of policy must meet."""
    run: RunConfig = field(default_factory=RunConfig)
    """Where the run is written."""

    def __post_init__(self) -> None:
        folder_name(self, "name")
        instance(self, "description", kind=str, remedy="write one line of text")
        require(
            self,
            "description",
            "\n" not in self.description.strip(),
            expected="one line of text",
            remedy="move the rest to a comment",
        )
