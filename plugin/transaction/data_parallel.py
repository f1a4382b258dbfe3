"""Repeats a step on one rank under `DistributedDataParallel`, while the other ranks simply wait.

The order of collectives stays as it is: what the wrapper has exchanged before forward is not
exchanged again, and parameters whose gradients are on their way are replaced by aliases, so that
the rest of the backward completes the reduction.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rematic.activations.nested import iter_leaves
from rematic.activations.torch_private import joins_uneven_inputs
from rematic.transaction.collectives import ForeignCollectives
from rematic.transaction.step_transaction import StepTransaction

_WRAPPERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]] = (
    weakref.WeakKeyDictionary()
)


def num_ranks() -> int:
    """Returns the number of processes that train together."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def this_rank() -> int:
    """Returns the number of this process among those that train together."""
    return torch.distributed.get_rank() if num_ranks() > 1 else 0


def find_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the wrapper around a model, or the model if it is one; None if there is none.

    A model does not know its wrapper, so all objects are looked at, once for each model.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    known = _WRAPPERS.get(model)
    wrapper = None if known is None else known()
    if wrapper is None:
        for candidate in gc.get_objects():
            if type(candidate) is DistributedDataParallel and candidate.module is model:
                wrapper = candidate
                _WRAPPERS[model] = weakref.ref(wrapper)
    return wrapper


class DataParallelStep:
    """One micro-batch under the wrapper: what of it the other ranks have seen.

    Args:
        wrapper: The wrapper.
        transaction: What an attempt can change.
    """

    def __init__(self, wrapper: DistributedDataParallel, transaction: StepTransaction) -> None:
        self._wrapper = wrapper
        self._transaction = transaction
        self.collectives = ForeignCollectives(wrapper.process_group)
        """What ranks have exchanged in the step beside what the wrapper exchanges."""
        self._num_forwards = 0
        self._is_inside = False
        self._in_backward = False
        self._entered = False
        self._exchanged = False
        self._syncs = False
        self._is_reducing = False
        self._aliased: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._handles = [
            wrapper.register_forward_pre_hook(self._at_wrapper, prepend=True),
            wrapper.module.register_forward_pre_hook(self._at_module, prepend=True),
            wrapper.register_forward_hook(self._after_wrapper),
        ]

    def obstacle(self) -> str | None:
        """Returns why this rank cannot repeat its step alone, None if it can."""
        if not (self._in_backward or (self._is_inside and not self._entered)):
            self.collectives.look()
        if self.collectives.found:
            return (
                "ranks exchanged tensors inside the step (beside the wrapper), which one of them "
                "cannot repeat alone. Exchange them after the step."
            )
        if self._num_forwards == 0 and not self._is_reducing:
            return None
        foreseen = self.foreseen_obstacle()
        if foreseen is not None:
            return foreseen
        if self._num_forwards > 1:
            return "the wrapper ran forward several times, which one reduction mixes."
        if not self._entered:
            return "memory ran out while the ranks exchanged buffers."
        return None

    def foreseen_obstacle(self) -> str | None:
        """Returns why no step from its forward on can be repeated, None if one can."""
        wrapper = self._wrapper
        if joins_uneven_inputs(wrapper):
            return "under `join` every forward of the wrapper tells the other ranks."
        if wrapper.static_graph:
            return "`static_graph` counts the hooks of its first steps, which a repetition changes."
        if wrapper._comm_hooks:
            return "a communication hook may have sent gradients in a form of its own."
        return None

    @property
    def is_reducing(self) -> bool:
        """Whether gradients are on their way to other ranks, so that they cannot be put back."""
        return self._is_reducing

    def undo(self) -> None:
        """Makes everything ready for the next attempt on this rank alone."""
        self._restore_wrapper()
        if not self._is_reducing:
            self._transaction.undo()
        else:
            self._transaction.undo_but_gradients()
            self._alias()
            self._wrapper.__dict__["forward"] = self._wrapper.module.__call__
        if self._exchanged:
            self._wrapper.require_forward_param_sync = False
        self._num_forwards, self._entered = 0, False
        self._is_inside = self._in_backward = False
        self.collectives.allow()

    def close(self) -> None:
        """Takes everything off the wrapper; safe to call twice."""
        self._restore_wrapper()
        if self._is_reducing:  # as its own forward has left it
            self._wrapper.require_forward_param_sync = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _at_wrapper(self, *_: object) -> None:
        self.collectives.look()
        self._num_forwards += 1
        self._is_inside = True
        self._syncs = self._wrapper.require_backward_grad_sync

    def _at_module(self, *_: object) -> None:
        if not self._is_inside:  # called without its wrapper, which exchanges nothing then
            return
        self.collectives.allow()
        if not self._exchanged:
            # buffers are now those of the first rank
            self._transaction.read_modules_again()
            self._exchanged = True
        self._entered = True

    def _after_wrapper(self, _module: nn.Module, _args: object, output: object) -> None:
        self._is_inside = False
        self.collectives.look()
        self._is_reducing |= self._syncs
        for tensor in iter_leaves(output):
            if tensor.requires_grad:
                tensor.register_hook(self._at_backward)

    def _at_backward(self, _gradient: torch.Tensor) -> None:
        if not self._in_backward:  # the wrapper sends gradients from now on
            self.collectives.look()
            self._in_backward = True

    def _alias(self) -> None:
        reduced = {id(p) for p in self._transaction.gradients.received()}
        aliases: dict[int, nn.Parameter] = {}
        for module in self._wrapper.module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in reduced:
                    self._aliased.append((module._parameters, name, parameter))
                    alias = aliases.setdefault(id(parameter), nn.Parameter(parameter.detach()))
                    module._parameters[name] = alias

    def _restore_wrapper(self) -> None:
        for home, name, parameter in self._aliased:
            home[name] = parameter
        self._aliased = []
        self._wrapper.__dict__.pop("forward", None)


def abort_ranks() -> bool:
    """Leaves the process group, so that ranks which wait for this one raise at once.

    Returns:
        Whether there were others.
    """
    if num_ranks() == 1:
        return False
    torch.distributed.destroy_process_group()
    return True


def sharding_obstacle(model: nn.Module) -> str | None:
    """Returns why a sharded model cannot be repeated on one rank, None if it is not sharded."""
    if not torch.distributed.is_available() or num_ranks() == 1:
        return None
    from torch.distributed.tensor import DTensor

    # the attribute is that of FullyShardedDataParallel, whose wrapper may be around the model
    if any(isinstance(p, DTensor) or hasattr(p, "_fsdp_flattened") for p in model.parameters()):
        return "its parameters are sharded, and the other ranks would have to gather them again."
    return None
