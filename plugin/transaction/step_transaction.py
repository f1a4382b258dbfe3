"""One micro-batch that can be undone and run again: all that an attempt at it may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rematic.activations.ambient import save_modes
from rematic.activations.host_generators import HOST_GENERATORS
from rematic.activations.kept_values import CLONED_BUFFER_BYTES, version_of
from rematic.activations.nested import ContainerContents, iter_leaves
from rematic.activations.torch_private import without_dispatch_modes
from rematic.memory import is_out_of_memory
from rematic.transaction.gradients import GradientContributions, RestoreError
from rematic.transaction.hook_state import HookState
from rematic.transaction.module_snapshot import ChangingState, ModuleSnapshot, TensorCopies
from rematic.transaction.outside_torch import StateOutsideTorch
from rematic.transaction.reached import ReachedByStep, reached_parts
from rematic.transaction.value_state import ValueState

_TRIES = 4


class StepTransaction:
    """The state before a micro-batch, to be put back after an attempt that failed.

    It covers gradients, generators (of torch and of its devices, those that modules or the batch
    hold or code names, Python's and NumPy's), grad mode, autocast and other switches of torch,
    hooks, buffers, attributes and containers of modules, and the batch.

    Args:
        model: The model.
        batch: What the step is given; containers inside it are put back in place.
        changing: What steps were seen to change; one for all steps of a model.
        others: Modules outside the model that a step changes, such as a host's metrics.
        step: The code of the step: what it reaches in closures and globals counts too.
        leaves: Tensors that are trained with the model, such as the parameters of an optimizer.
        skipped: Names of attributes of modules that belong to a host.
        counts_gradients: Whether contributions to gradients are counted from now on; otherwise from
            `count_gradients` on, for hosts that clear gradients between forward and backward.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object = None,
        *,
        changing: ChangingState | None = None,
        others: Iterable[nn.Module] = (),
        step: Callable[..., Any] | None = None,
        leaves: Iterable[torch.Tensor] = (),
        skipped: frozenset[str] = frozenset(),
        counts_gradients: bool = True,
    ) -> None:
        self._changing = ChangingState() if changing is None else changing
        reached = ReachedByStep(step)
        modules = [*model.modules(), *others]
        known = set(map(id, modules))
        self._modules = [*modules, *reached_parts(reached.modules, known)]
        self._skipped = skipped
        self._put_modes_back = save_modes()
        self._values = ValueState()
        self._values.read(batch, "the batch")
        self._snapshot = self._read_modules()
        hidden = (*self._snapshot.values.modules, *self._values.modules)
        found = reached_parts(hidden, known)  # in lists, say, where torch does not see them
        if found:
            self._modules += found
            self._snapshot = self._read_modules()
        # without a second walk, which is a tenth of what all this costs
        parameters = _each_once(
            (
                *(p for m in self._modules for p in m._parameters.values() if p is not None),
                *(*leaves, *reached.leaves, *self._snapshot.values.leaves),
            )
        )
        self._hooks = HookState(self._modules, parameters)
        self._iterators = reached.iterators
        self._reached = [StateOutsideTorch.of_generator(g) for g in reached.generators]
        self._generators = _generator_states(parameters, batch)
        self._contents = ContainerContents([batch])
        self._takes_from_iterator = any(iter_leaves(batch, leaf=Iterator))
        self._batch = [_BatchTensor(tensor) for tensor in iter_leaves(batch)]
        self._parameters = [(p, version_of(p), p.requires_grad) for p in parameters]
        self.num_torn = 0
        """What `give_up` has returned, or would have if memory had not run out in it."""
        self.gradients = GradientContributions([])
        if counts_gradients:
            self.count_gradients()

    def count_gradients(self) -> None:
        """Takes the present gradients for those before the step."""
        parameters = [parameter for parameter, _, _ in self._parameters]
        leaves = [b.tensor for b in self._batch if b.tensor.is_leaf and b.tensor.requires_grad]
        self.gradients.close()
        self.gradients = GradientContributions(_each_once([*parameters, *leaves]))

    def modules_now(self) -> ModuleSnapshot:
        """Returns the present state of the modules, without what a graph hangs on."""
        now = self._read_modules()
        now.leave_graphs()
        return now

    def read_modules_again(self) -> None:
        """Takes the present state of the modules for that before the step.

        (A wrapper may have changed buffers before forward: data-parallel ranks take those of the
        first one.)
        """
        self._snapshot = self._read_modules()

    def changed_parameters(self) -> list[torch.Tensor]:
        """Returns the parameters that were changed in place, which nothing puts back."""
        return [p for p, version, _ in self._parameters if version_of(p) != version]

    def check(self, *, in_parts: bool = False, with_gradients: bool = True) -> None:
        """Refuses what cannot be undone, before anything is.

        Args:
            in_parts: Whether the next attempt has the batch in parts.
            with_gradients: Whether gradients are to be undone too.

        Raises:
            RestoreError: If parameters, large buffers or the batch were changed in place, or
                gradients by something other than backward.
        """
        changed = self.changed_parameters()
        if changed:
            raise RestoreError(
                f"{len(changed)} parameters (the first of shape {tuple(changed[0].shape)}) were "
                "changed inside the step, by an optimizer that steps in it or a weight that "
                "forward changes. Step the optimizer after the step, not inside it."
            )
        if with_gradients:
            self.gradients.check()
        if in_parts:
            self.gradients.check_parts()
        if self._takes_from_iterator:
            raise RestoreError(
                "the batch is or holds an iterator, from which a second attempt would take what "
                "comes next. Take the batch from it before the step."
            )
        if self._iterators:
            raise RestoreError(
                f"the step takes from an iterator outside of it ({self._iterators[0]!r}), from "
                "which a second attempt would take what comes next. Take the batch from it before "
                "the step."
            )
        for tensor in self._batch:
            tensor.check()
        for state in self._values.outside:
            state.check()
        self._snapshot.check()

    def undo(self) -> None:
        """Makes everything ready for the next attempt."""
        self.gradients.undo()
        self._put_back()

    def undo_but_gradients(self) -> None:
        """Makes everything ready but gradients, of which others have a part already."""
        self._put_back()

    def undo_for_parts(self) -> None:
        """Makes everything ready for an attempt with the batch in parts."""
        self.undo()
        self.gradients.expect_parts()

    def give_up(self) -> int:
        """Puts everything back for good.

        Returns:
            The number of parameters whose gradient from earlier micro-batches holds a part of this
            one, which nothing can take out again.
        """
        self.num_torn = len(self.gradients.restore())
        self._put_back()
        return self.num_torn

    def copies_for_checkpoint(self) -> tuple[TensorCopies, Sequence[tuple[Any, Any]]]:
        """Returns copies of tensors and states of generators, which outlive the transaction."""
        return self._snapshot.tensor_copies(), self._generators

    def commit(self) -> None:
        """Ends a step that went well, and learns what it changed."""
        try:
            self._snapshot.learn()
        except RuntimeError as error:  # it went well all the same, and the next one teaches it
            if not is_out_of_memory(error):
                raise
        finally:
            self.gradients.close()

    def close(self) -> None:
        """Ends the step in any other way; safe to call twice."""
        self.gradients.close()

    def _read_modules(self) -> ModuleSnapshot:
        return ModuleSnapshot(self._modules, self._changing, skipped=self._skipped)

    def _put_back(self) -> None:
        # Copies into tensors that are there allocate nothing (and modes of the user's that might
        # are none of theirs); tensors that were resized do. Done again, it does the same.
        for _ in range(_TRIES - 1):
            try:
                with without_dispatch_modes():
                    return self._put_back_once()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        with without_dispatch_modes():
            self._put_back_once()

    def _put_back_once(self) -> None:
        self._put_modes_back()
        self._snapshot.restore()
        self._hooks.restore()
        for parameter, _, requires_grad in self._parameters:
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
        self._values.restore()
        self._contents.restore()
        for tensor in self._batch:
            tensor.restore()
        for reached in self._reached:
            reached.restore()
        for generator, state in self._generators:
            generator.set_state(state)
        torch.clear_autocast_cache()  # weights that the attempt cast, with their graph


class _BatchTensor:
    """A tensor of the batch: a copy where it is small, its in-place counter where it is not."""

    __slots__ = ("_clone", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        small = tensor.numel() * tensor.element_size() <= CLONED_BUFFER_BYTES
        copy = small and not tensor.requires_grad and not tensor.is_nested
        self.tensor = tensor
        self._clone = tensor.clone() if copy else None
        self._version = version_of(tensor)

    @property
    def _is_changed(self) -> bool:
        return version_of(self.tensor) != self._version

    def check(self) -> None:
        if self._is_changed and self._clone is None:
            raise RestoreError(
                f"a tensor of the batch of shape {tuple(self.tensor.shape)} was changed in place. "
                "Clone it inside the step before changing it."
            )

    def restore(self) -> None:
        if self._is_changed and self._clone is not None:
            self.tensor.data.copy_(self._clone)


class _TorchGenerator:
    """The default generator of the CPU or of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch itself, torch.cuda, torch.xpu, ...: modules without a common type
        self._module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        self._where = () if device.type == "cpu" else (device,)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(*self._where)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, *self._where)


def _generator_states(parameters: Sequence[torch.Tensor], batch: object) -> list[tuple[Any, Any]]:
    devices = {parameter.device for parameter in parameters} | {torch.device("cpu")}
    found: list[Any] = [
        _TorchGenerator(device)
        for device in sorted(devices, key=str)
        if device.type == "cpu" or _has_generator(device)
    ]
    found += [*iter_leaves(batch, leaf=torch.Generator), *HOST_GENERATORS]
    return [(generator, generator.get_state()) for generator in found]


def _has_generator(device: torch.device) -> bool:
    return device.type != "meta" and hasattr(torch.get_device_module(device), "get_rng_state")


def _each_once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
