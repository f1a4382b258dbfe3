"""Drives a Session from inside an Accelerator, whose methods are wrapped on the instance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from rematic.attachment import attach
from rematic.batch_shape import BatchShape, default_batch_shape
from rematic.control import StopReport
from rematic.hosts.accelerate_checkpoint import AcceleratorSaves, EmergencySaves
from rematic.hosts.accelerate_step import AcceleratorCounters, HostState, RecoverableCall
from rematic.hosts.accelerate_takeover import TakenKeys
from rematic.hosts.gradient_seams import cover_methods
from rematic.hosts.instance_method import InstanceMethod
from rematic.hosts.session_file import read_session, write_session
from rematic.hosts.step_figures import StepFigures
from rematic.journal import EventSink
from rematic.memory import Probe
from rematic.policy import Policy
from rematic.recipes import Recipe, load_recipe
from rematic.session import Session
from rematic.split_batch import Reduction

_log = logging.getLogger("rematic")
_OWN_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Backward is theirs, and so are the gradients."""
_ON_GRADIENTS = ("clip_grad_norm_", "clip_grad_value_", "unscale_gradients")
_SHARDED = "its parameters are sharded, and what a failed backward has gathered stays gathered."
_PLACED_BY_WRAPPER = (DistributedType.FSDP, *_OWN_ENGINES)


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """What a plugin hands to `rematic.attach`."""

    recipe: str | Path | Recipe | Mapping[str, Any]
    """As of `attach`."""

    overrides: tuple[str, ...]
    """`key=value` texts over a recipe by name or path."""

    budget: int | float | str | None
    """As of `attach`."""

    policy: str | Policy | None
    """As of `attach`."""

    probe: str | Probe | None
    """As of `attach`."""

    batch_shape: Callable[[object], BatchShape] | None
    """As of `attach`; None for its default."""

    journal: EventSink | None
    """As of `attach`."""

    on_escalation: Callable[[str], None] | None
    """As of `attach`."""

    emergency_dir: Path | None = None
    """As of `AcceleratorSaves` and `TrainerSaves`."""

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, (str, Path, Recipe, Mapping)):
            raise ValueError(
                f"recipe is {self.recipe!r}: expected `auto`, a recipe's name, a path, a recipe, "
                "or a config with a recipe's keys."
            )
        if self.overrides and not isinstance(self.recipe, (str, Path)):
            raise ValueError(
                f"overrides are {list(self.overrides)} and the recipe is no name or path: expected "
                "overrides only over a recipe that is read here. Put the values into the recipe."
            )

    def attach(self, model: nn.Module, device: torch.device | None) -> Session:
        """Attaches to a model that is going to train on `device`; None: where it is."""
        recipe = self.recipe
        if isinstance(recipe, (str, Path)):
            recipe = load_recipe(recipe, self.overrides)
        return attach(
            model,
            recipe=recipe,
            budget=self.budget,
            policy=self.policy,
            probe=self.probe,
            batch_shape=self.batch_shape or default_batch_shape,
            journal=self.journal,
            on_escalation=self.on_escalation,
            device=device,
        )


class AccelerateDriver:
    """One Accelerator, and one session at a time for the model that it prepares.

    Args:
        options: How to attach.
        enabled: Whether anything is done.
    """

    def __init__(self, options: AttachOptions, *, enabled: bool) -> None:
        self.enabled = enabled
        self.session: Session | None = None
        """The session that is or was attached last."""
        self.figures = StepFigures()
        """What the steps since the last report took."""
        self.is_attached = False
        """Whether a model is managed now."""
        self.split_by: str | None = "@plugin.step(reduction=...)"
        """The call that takes how a loss combines sequences; None where batches are not split."""
        self.manages_prepared = True
        """Whether what `prepare` is given is for training; hosts prepare for evaluation too."""
        self.options = options
        self.saves: EmergencySaves | None = None
        """What saves a training that stops; made with the Accelerator."""
        self._accelerator: Any = None  # accelerate ships no types
        self._seams: list[InstanceMethod] = []
        self._hooks: list[Any] = []  # handles of accelerate's hooks
        self._taken: TakenKeys | None = None
        self._covered: list[torch.optim.Optimizer] = []
        self._is_open = False
        self._told_of_split = False
        self._carried: tuple[int, dict[str, Any]] | None = None
        self.restore_from: Path | None = None
        """Folder of a checkpoint whose state the next session takes up."""

    def attach(self, accelerator: Any, *, may_be_prepared: bool = False) -> None:  # noqa: ANN401 - accelerate ships no types
        """Wraps the methods of an Accelerator.

        Args:
            accelerator: The Accelerator.
            may_be_prepared: Whether it may have prepared models before, since its host prepares
                them again for every training.
        """
        if not self.enabled or accelerator is self._accelerator:
            return
        self._refuse(accelerator)
        if not may_be_prepared and any(True for _ in getattr(accelerator, "_models", ())):
            raise ValueError(
                "`accelerator.prepare` was called before `plugin.attach(accelerator)`: expected "
                "the other order, so that the model is attached before it is wrapped."
            )
        self._accelerator = accelerator
        self._taken = TakenKeys(accelerator)
        self.saves = AcceleratorSaves(accelerator, self.options.emergency_dir)
        self._seams = [
            InstanceMethod(accelerator, "prepare", self._prepare),
            InstanceMethod(accelerator, "free_memory", self._free_memory),
            InstanceMethod(accelerator, "log", self._log_figures),
            InstanceMethod(accelerator, "load_state", self._load_state),
            *cover_methods(accelerator, _ON_GRADIENTS, self._attached),
        ]
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]

    def step(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        state: HostState | None = None,
        reduction: Reduction | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the user's step returns
        """Runs forward and backward of one micro-batch, again if memory runs out.

        Args:
            fn: Forward and backward.
            args: Its arguments.
            kwargs: Its keyword arguments.
            state: What the host counts inside the step; None for the Accelerator's accumulation.
            reduction: How the loss combines the sequences of the batch; None: unknown.
        """
        if not self.enabled or self._is_open:
            return fn(*args, **kwargs)
        if self.session is None or not self.is_attached:
            raise RuntimeError(
                "no model is attached: expected `plugin.attach(accelerator)` and then "
                "`accelerator.prepare(model, ...)` before the first step."
            )
        assert self.saves is not None
        state = state or AcceleratorCounters(self._accelerator)
        if self.session.begins_window:
            self.saves.begin_window(state)
        call = RecoverableCall(
            self.session,
            self._accelerator,
            state,
            obstacle=self._obstacle(),
            reduction=reduction,
        )
        self._tell_of_split(is_possible=reduction is not None and self._is_alone)
        self._is_open = True
        try:
            result, record = call.run(fn, args, kwargs)
        finally:
            self._is_open = False
        self.saves.end_step()
        self.figures.add(record)
        return result

    def manage(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Attaches to a model, or covers more optimizers of the one that is attached."""
        if not self.is_attached:
            self.session = self.options.attach(model, self._device_to_be())
            self.session.split_by = self.split_by if self._is_alone else None
            self.session.at_stop = self._save_at_stop
            self.is_attached = True
            self._take_up_carried()
            self._tell_what_is_repeated()
        assert self.session is not None
        if self.session.model is not model:
            _log.warning(
                "%s is prepared beside the model that rematic manages (%s), and left alone.",
                type(model).__name__,
                type(self.session.model).__name__,
            )
            return
        self.cover(optimizers)

    def cover(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Covers optimizers that hold parameters of the model and are not covered yet."""
        assert self.session is not None
        known = {id(p) for p in self.session.model.parameters()}
        for optimizer in optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)  # of an AcceleratedOptimizer
            params = (p for group in inner.param_groups for p in group["params"])
            if any(id(p) in known for p in params) and not any(inner is o for o in self._covered):
                self._covered.append(inner)
                self.session.add_optimizers(inner)

    def detach_model(self) -> None:
        """Gives back the model and its optimizers; what was learned stays for the next one."""
        if self.session is not None and self.is_attached:
            self._carried = (_num_elements(self.session.model), self.session.state_dict())
            self.session.detach()
        self.is_attached, self._covered = False, []

    def detach(self) -> None:
        """Gives back everything."""
        self.detach_model()
        for seam in reversed(self._seams):
            seam.remove()
        for hook in self._hooks:
            hook.remove()
        if self._taken is not None:
            self._taken.give_back()
        self._seams, self._hooks, self._taken, self._accelerator = [], [], None, None

    def _refuse(self, accelerator: Any) -> None:  # noqa: ANN401 - accelerate ships no types
        if self._accelerator is not None:
            raise ValueError(
                "this plugin is attached to another Accelerator: expected one plugin for each. "
                "Call `plugin.detach()` first, or make a second plugin."
            )
        if isinstance(vars(accelerator).get("prepare"), InstanceMethod):
            raise ValueError(
                "another plugin is attached to this Accelerator: expected one. Call its `detach()` "
                "first, or give this one's fields to it."
            )
        if accelerator.distributed_type in _OWN_ENGINES:
            raise ValueError(
                f"the Accelerator runs {accelerator.distributed_type.value}, whose engine does "
                "backward and owns the gradients: expected one process, DDP or FSDP. Use its own "
                "activation checkpointing there."
            )

    def _prepare(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as prepare's
        optimizers = [a for a in args if isinstance(a, torch.optim.Optimizer)]
        placements = kwargs.get("device_placement") or [None] * len(args)
        was_attached = self.is_attached
        for model, placement in zip(args, placements, strict=False):
            if self.manages_prepared and _is_trained(model):
                inner = self._accelerator.unwrap_model(model)
                self._place(inner, placement)
                self.manage(inner, optimizers)
        if self.is_attached:
            self.cover(optimizers)
        try:
            result = prepare(*args, **kwargs)
        except BaseException:
            if not was_attached:
                self.detach_model()
            raise
        if self.session is not None and self.is_attached:
            self.session.read_parameters()
        return result

    def _device_to_be(self) -> torch.device | None:
        """Returns where a wrapper is going to move a model; None: it is there already."""
        if self._accelerator.distributed_type not in _PLACED_BY_WRAPPER:
            return None
        device: torch.device = self._accelerator.device
        return device

    def _place(self, model: nn.Module, placement: bool | None) -> None:
        """Moves a model to the device where `prepare` is going to put it."""
        accelerator = self._accelerator
        if placement is None:
            placement = accelerator.device_placement
        if accelerator.distributed_type in _PLACED_BY_WRAPPER or hasattr(model, "hf_device_map"):
            return
        first = next(model.parameters())
        if placement and first.device not in (accelerator.device, torch.device("meta")):
            model.to(accelerator.device)

    def _free_memory(self, free: Callable[..., Any], *objects: Any) -> Any:  # noqa: ANN401 - as free_memory's
        self.detach_model()
        self.session = None  # which holds the model
        return free(*objects)

    def _log_figures(
        self, log: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:  # noqa: ANN401 - as log's
        return log({**values, **self.figures.take()}, *args, **kwargs)

    def _save(self, models: object, weights: object, output_dir: str) -> None:
        if self.session is not None and self._accelerator.is_main_process:
            write_session(self.session, Path(output_dir))

    def _load(self, models: object, input_dir: str) -> None:
        if self.session is not None and self.is_attached:
            read_session(self.session, Path(input_dir))

    def _load_state(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as load_state's
        result = load(*args, **kwargs)
        if self.saves is not None:
            self.saves.end_step()
        return result

    def _attached(self) -> Session | None:
        return self.session if self.is_attached else None

    def _save_at_stop(self, report: StopReport) -> str:
        assert self.saves is not None
        assert self.session is not None
        return self.saves.save(self.session, report)

    @property
    def _is_alone(self) -> bool:
        alone: bool = self._accelerator.distributed_type == DistributedType.NO
        return alone

    def _obstacle(self) -> str | None:
        if self._accelerator.distributed_type == DistributedType.FSDP:
            return _SHARDED
        return None

    def _tell_of_split(self, *, is_possible: bool) -> None:
        assert self.session is not None
        if self.session.settings.allow_split and not is_possible and not self._told_of_split:
            self._told_of_split = True
            _log.warning(
                "control.allow_split has no effect here: it needs one process, and "
                "`@plugin.step(reduction=...)` to say how the loss combines sequences."
            )

    def _tell_what_is_repeated(self) -> None:
        if self._obstacle() is not None:
            _log.info(
                "%s: failed allocations are answered at the op and at the unit, on each rank by "
                "itself; whole micro-batches are not run again.",
                self._accelerator.distributed_type.value,
            )

    def _take_up_carried(self) -> None:
        """Goes on with what was learned before the model was given back, if it is the same."""
        assert self.session is not None
        carried, self._carried = self._carried, None
        folder, self.restore_from = self.restore_from, None
        if folder is not None and read_session(self.session, folder):
            return
        if carried is None or carried[0] != _num_elements(self.session.model):
            return
        if carried[1]["units"] == self.session.state_dict()["units"]:
            self.session.load_state_dict(carried[1])


def _num_elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _is_trained(value: object) -> bool:
    return isinstance(value, nn.Module) and any(p.requires_grad for p in value.parameters())
