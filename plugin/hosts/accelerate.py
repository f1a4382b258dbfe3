"""A plugin for Hugging Face Accelerate and for the Trainer of Transformers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import nn
from typing_extensions import ParamSpec

from rematic.batch_shape import BatchShape
from rematic.hosts.accelerate_driver import AccelerateDriver, AttachOptions
from rematic.hosts.recompute_environment import read_environment
from rematic.journal import EventSink
from rematic.memory import Probe
from rematic.policy import Policy
from rematic.recipes import Recipe
from rematic.session import Session
from rematic.split_batch import Reduction

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

    from rematic.hosts.transformers_trainer import TrainerDriver

P = ParamSpec("P")
T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=nn.Module)
_RETURN_EARLY = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
"""Tell functions that have done nothing yet when they return."""


@dataclass(kw_only=True)
class RecomputePlugin:
    """Trains inside a memory budget what an Accelerator prepares.

    Reads nothing from the environment; `from_config` does.

    Examples:
        >>> plugin = RecomputePlugin(budget="20GiB")
        >>> plugin.is_attached
        False
    """

    recipe: str | Path | Recipe | Mapping[str, Any] = "auto"
    """`auto`, a recipe's name, a path, a recipe, or a config with a recipe's keys."""

    overrides: Sequence[str] = ()
    """`key=value` texts over a recipe that is given by name or path."""

    budget: int | float | str | None = None
    """Bytes that may be in use, weights and optimizer included, such as `20GiB`, a share of the
    device such as 0.9, or `auto`; instead of the recipe's. On a CPU it must be given."""

    policy: str | Policy | None = None
    """A policy or the name of one; instead of the recipe's."""

    probe: str | Probe | None = None
    """`auto`, `host`, `cuda`, or a probe; instead of the recipe's."""

    batch_shape: Callable[[object], BatchShape] | None = None
    """Reads a batch; None: the largest tensor in it, integers first."""

    journal: EventSink | None = None
    """Takes the decisions, such as a `rematic.journal.JournalWriter`."""

    on_escalation: Callable[[str], None] | None = None
    """Called with what a person must decide, if the recipe has `control: {escalation: call}`."""

    emergency_dir: str | Path | None = None
    """Folder that a training which stops for good is saved to; None: `rematic-emergency` in the
    Trainer's `output_dir` or the Accelerator's `project_dir`, or beside the journal."""

    enabled: bool = True
    """Whether anything is done; False: the script runs as if the plugin were not there."""

    _driver: AccelerateDriver = field(init=False, repr=False, compare=False)
    _trainer: TrainerDriver | None = field(init=False, repr=False, compare=False, default=None)
    _use_cache: tuple[Any, Any] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ValueError(f"enabled is {self.enabled!r}: expected True or False.")
        options = AttachOptions(
            recipe=self.recipe,
            overrides=tuple(self.overrides),
            budget=self.budget,
            policy=self.policy,
            probe=self.probe,
            batch_shape=self.batch_shape,
            journal=self.journal,
            on_escalation=self.on_escalation,
            emergency_dir=None if self.emergency_dir is None else Path(self.emergency_dir),
        )
        self._driver = AccelerateDriver(options, enabled=self.enabled)

    @classmethod
    def from_config(cls, **fields: Any) -> RecomputePlugin:
        """Makes a plugin as the Accelerate config says, by what the launcher put into environment.

        `REMATIC_RECIPE` and `REMATIC_OVERRIDES` name the recipe, `REMATIC_ENABLED` turns it on or
        off. Without them Accelerate's own key for activation checkpointing turns it on. If nothing
        is set the plugin is disabled.

        Args:
            **fields: Fields of the plugin, which win over the environment.

        Raises:
            ValueError: If a variable holds something else than it should.
        """
        return cls(**{**read_environment(), **fields})

    @property
    def session(self) -> Session | None:
        """The session of the model that is or was managed last; None before the first."""
        return self._driver.session

    @property
    def is_attached(self) -> bool:
        """Whether a model is managed now."""
        return self._driver.is_attached

    def attach(self, accelerator: Accelerator) -> RecomputePlugin:
        """Manages the model that `accelerator.prepare` is given from now on.

        It is moved to its device and attached there, before it is wrapped. Accelerate's own
        activation checkpointing is turned off until `detach`.

        Args:
            accelerator: The Accelerator, before its `prepare` is called.

        Returns:
            The plugin.

        Raises:
            ValueError: If `prepare` was called already, the plugin has another Accelerator, or the
                Accelerator runs DeepSpeed or Megatron-LM.
        """
        self._driver.attach(accelerator)
        return self

    @overload
    def step(self, fn: Callable[P, T]) -> Callable[P, T]: ...

    @overload
    def step(
        self, fn: None = None, *, reduction: Reduction | None
    ) -> Callable[[Callable[P, T]], Callable[P, T]]: ...

    def step(
        self, fn: Callable[P, T] | None = None, *, reduction: Reduction | None = None
    ) -> Callable[P, T] | Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorates a function that does forward and backward of one micro-batch.

        Its first argument is the batch (a method's object, models and optimizers left out). If
        memory runs out, everything that it changed is put back and it runs again under a heavier
        plan. It ends before gradients are clipped.

        Args:
            fn: The function, or a method; without one a decorator is returned.
            reduction: How the loss combines the sequences of a batch, as of `Session.run`;
                `control.allow_split` needs it, and the function returns the loss then.

        Raises:
            ValueError: If the function is a generator or a coroutine, which has done nothing yet
                when the call returns.
            StepOutOfMemoryError: When called, if nothing that is allowed helps; an error that
                `accelerate.find_executable_batch_size` answers.
        """
        if fn is None:
            return functools.partial(self._decorated, reduction=reduction)
        return self._decorated(fn, reduction=reduction)

    def attach_trainer(self, trainer: Trainer) -> RecomputePlugin:
        """Manages what a Trainer of Transformers (or of TRL) trains, from `train()` to its end.

        Its `activation_checkpointing`, under either name, is turned off until `detach`.

        Args:
            trainer: The Trainer, outside of `train()`.

        Returns:
            The plugin.

        Raises:
            ValueError: If the Trainer trains by `nn.DataParallel`, DeepSpeed or Megatron-LM, or
                the plugin has another Trainer.
        """
        from rematic.hosts.transformers_trainer import TrainerDriver  # needs transformers

        if self.enabled and (self._trainer is None or self._trainer.trainer is not trainer):
            self._trainer = TrainerDriver(self._driver, trainer, use_cache=self._use_cache)
        return self

    def remember(self, model: ModelT) -> ModelT:
        """Remembers `config.use_cache`, which `Trainer(...)` turns off, to put it back at the end.

        `Trainer(model=plugin.remember(model), ...)`.

        Args:
            model: The model, before the Trainer is made.

        Returns:
            The model.
        """
        config: Any = getattr(model, "config", None)
        if self.enabled and hasattr(config, "use_cache"):
            self._use_cache = (config, config.use_cache)
        return model

    def detach(self) -> None:
        """Gives back model, optimizers, Accelerator and Trainer; safe to call twice."""
        if self._trainer is not None:
            self._trainer.detach()
            self._trainer = None
        self._driver.detach()

    def _decorated(self, fn: Callable[P, T], *, reduction: Reduction | None) -> Callable[P, T]:
        if any(returns_early(fn) for returns_early in _RETURN_EARLY):
            raise ValueError(
                f"{fn.__name__} is a generator or a coroutine: expected a function that has done "
                "forward and backward when it returns. Decorate the function inside that does."
            )

        @functools.wraps(fn)
        def step(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = self._driver.step(fn, args, kwargs, reduction=reduction)
            return result

        return step
