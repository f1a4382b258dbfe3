"""Answers an allocation failure where it happens: evict, and run the one failing op again.

A dispatch mode around the step sees every aten op of forward, loss, replay, backward and
optimizer. What compiled code or a custom kernel allocates outside aten it does not see: there the
unit's forward is run again (`Unit.run`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.activations.nested import iter_leaves
from rematic.memory import (
    ListVersions,
    autocast_of_call,
    changed_lists,
    is_out_of_memory,
    load_compiler_now,
    requested_bytes,
)
from rematic.memory.storages import storages_of

# In-place ops that allocate, if at all, before they write: TensorIterator makes its casts first,
# and the fused optimizers make one pass over tensors that exist already.
_RETRYABLE_IN_PLACE = frozenset(
    """
    aten::abs_ aten::add_ aten::addcdiv_ aten::addcmul_ aten::addmm_ aten::baddbmm_
    aten::bernoulli_ aten::bitwise_and_ aten::bitwise_or_ aten::clamp_ aten::clamp_max_
    aten::clamp_min_ aten::copy_ aten::cos_ aten::cumsum_ aten::div_ aten::eq_ aten::erf_
    aten::exp_ aten::exponential_ aten::fill_ aten::floor_ aten::ge_ aten::gt_ aten::hardtanh_
    aten::index_put_ aten::_index_put_impl_ aten::le_ aten::leaky_relu_ aten::lerp_ aten::log_
    aten::logical_and_ aten::lt_ aten::masked_fill_ aten::mul_ aten::neg_ aten::normal_
    aten::pow_ aten::random_ aten::reciprocal_ aten::relu_ aten::resize_ aten::round_
    aten::rsqrt_ aten::scatter_ aten::scatter_add_ aten::set_ aten::sigmoid_ aten::sign_ aten::silu_
    aten::sin_ aten::sqrt_ aten::sub_ aten::tanh_ aten::tril_ aten::triu_ aten::uniform_
    aten::zero_ aten::_fused_adam_ aten::_fused_adamw_ aten::_fused_sgd_ aten::_fused_adagrad_
    """.split()  # noqa: SIM905 - one string is easier to read and to keep in order than 50
)
_BATCH_NORM_WORD = "batch_norm"
"""Ops with this in their name change running statistics although their schema does not say so."""


@dataclass(frozen=True, slots=True)
class _OpTraits:
    """What must hold before an op may run a second time."""

    retryable: bool
    random: bool
    updates_statistics: bool
    foreach_in_place: bool
    outs: tuple[str, ...]
    """Arguments that it only writes (`out=`)."""
    lists: tuple[int, ...]
    """Arguments that are lists which the op changes in place."""

    @property
    def changes_state(self) -> bool:
        """Whether the op may change a generator or statistics before it fails."""
        return self.random or self.updates_statistics


class OpRetry(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch 2.13 leaves it untyped
    """Runs an aten op again after evicting, when it ran out of memory.

    Args:
        relieve: Called with the bytes wanted and the op's name; evicts and returns the bytes it
            freed. No bytes means that the failure stands.
        after_op: Called after every op, None for never (it costs time on every op).
    """

    def __init__(
        self,
        relieve: Callable[[int, str], int],
        *,
        after_op: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        load_compiler_now()
        self._relieve = relieve
        self._after_op = after_op
        self._traits: dict[Any, _OpTraits] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled units run under the mode; their kernels are not seen by it."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one op; `Any`, since the dispatcher passes whatever the op takes."""
        kwargs = kwargs or {}
        traits = self._traits.get(func) or self._learn(func)
        before: _Before | None = None
        versions = ListVersions(traits.lists, args) if traits.lists else None
        while True:
            try:
                if before is None and traits.changes_state:
                    before = _Before(traits, args, kwargs)
                with autocast_of_call(func):
                    result = func(*args, **kwargs)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error) or not _may_run_again(traits, args, kwargs):
                    raise
                wanted = requested_bytes(error)
                failure = str(error)
            # outside `except`, so that nothing of the failed call is alive when memory is freed
            if self._relieve(wanted, str(func)) <= 0:
                raise torch.OutOfMemoryError(failure)
            if before is not None:
                before.restore()
        if versions is not None:
            versions.count()
        if self._after_op is not None:
            self._after_op()
        return result

    def _learn(self, func: Any) -> _OpTraits:
        name = func._schema.name
        in_place = func._schema.is_mutable
        foreach = in_place and name.startswith("aten::_foreach_")
        written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        outs = tuple(argument.name for argument in written if argument.is_out)
        only_outs = len(outs) == len(written)
        traits = _OpTraits(
            retryable=not in_place or foreach or only_outs or name in _RETRYABLE_IN_PLACE,
            random=torch.Tag.nondeterministic_seeded in func.tags,
            updates_statistics=_BATCH_NORM_WORD in name and "backward" not in name,
            foreach_in_place=foreach,
            outs=outs,
            lists=changed_lists(func),
        )
        self._traits[func] = traits
        return traits


class _Before:
    """Generators and running statistics from before an op that may change them and then fail.

    (CPU dropout draws its mask before it allocates its output; batch norm updates its statistics
    before it allocates its scale.)
    """

    def __init__(self, traits: _OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._generators = [
            (generator, generator.get_state())
            for generator in (_generators(args, kwargs) if traits.random else ())
        ]
        # running mean and variance are the one-dimensional tensors that need no gradient
        self._statistics = [
            (tensor, tensor.clone())
            for tensor in (iter_leaves((args, kwargs)) if traits.updates_statistics else ())
            if tensor.dim() == 1 and not tensor.requires_grad
        ]

    def restore(self) -> None:
        for generator, state in self._generators:
            generator.set_state(state)
        for tensor, values in self._statistics:
            tensor.data.copy_(values)


def _generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    given = kwargs.get("generator")
    if given is not None:
        return [given]
    devices = {tensor.device for tensor in iter_leaves((args, kwargs))}
    device = kwargs.get("device")
    devices.update([torch.device(device)] if device is not None else [])
    found = [torch.default_generator]
    for device in sorted((d for d in devices if d.type == "cuda"), key=str):
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def _may_run_again(traits: _OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if traits.outs:
        return traits.retryable and not _reads_what_it_writes(traits.outs, args, kwargs)
    if not traits.foreach_in_place:
        return traits.retryable
    # The slow path goes tensor by tensor and may be half done; it allocates only to promote
    # types. With one dtype in all lists a failure was reported before anything was written.
    dtypes = {tensor.dtype for tensor in iter_leaves((args, kwargs)) if tensor.dim() > 0}
    return len(dtypes) <= 1


def _reads_what_it_writes(
    outs: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    written = {id(storage) for name in outs for storage in storages_of(kwargs.get(name))}
    read = [value for name, value in kwargs.items() if name not in outs]
    return any(id(storage) in written for storage in storages_of((args, read)))
