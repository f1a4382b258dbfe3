"""What a recipe can say.

Every class is one section; every field has a default unless its docstring says otherwise, so a
recipe holds only what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rematic.recipes.control_schema import ControlConfig, GoalsConfig
from rematic.recipes.cross_checks import check_sections
from rematic.recipes.data_schema import DataConfig, EvaluationConfig
from rematic.recipes.field_checks import folder_name, instance, require
from rematic.recipes.figures_schema import FiguresConfig
from rematic.recipes.model_schema import ModelConfig
from rematic.recipes.policy_schema import PolicyConfig
from rematic.recipes.run_schema import DistributedConfig, MemoryConfig, RunConfig
from rematic.recipes.training_schema import TrainingConfig
from rematic.recipes.tuning_schema import QuantizationConfig, TuningConfig, WeightFormat


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe; without arguments it is what `auto` means."""

    name: str = "auto"
    """Names the recipe and, without run.name, its runs; a file's default is the file's own name."""
    description: str = ""
    """What the recipe is for, in one line; default empty."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to build."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    """Which weights are trained."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """How the frozen ones are held."""
    data: DataConfig = field(default_factory=DataConfig)
    """The documents to train on."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The documents that are not trained on."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How the model is trained."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """The processes that train together."""
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
    planned_on: FiguresConfig = field(default_factory=FiguresConfig)
    """The device the recipe is meant for, and what a step needs there by the plan."""
    measured_on: FiguresConfig = field(default_factory=FiguresConfig)
    """What a step was measured to need, and where."""

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
        check_sections(self)

    @property
    def weight_format(self) -> WeightFormat:
        """How the frozen weights of linear layers are held."""
        return self.quantization.resolved(self.tuning.method)

    @property
    def saved(self) -> tuple[Literal["adapter", "merged", "full"], ...]:
        """The kinds of weights that are saved at the end."""
        if self.run.save == "auto":
            return ("full",) if self.tuning.method == "full" else ("adapter",)
        return _KINDS_OF_WEIGHTS[self.run.save]


_KINDS_OF_WEIGHTS: Mapping[str, tuple[Literal["adapter", "merged", "full"], ...]] = {
    "none": (),
    "adapter": ("adapter",),
    "merged": ("merged",),
    "adapter+merged": ("adapter", "merged"),
    "full": ("full",),
}
