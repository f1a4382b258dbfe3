"""The profile of a live model, traced while it trains: what steps like the one at hand cost."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from rematic.activations.host_generators import save_generators
from rematic.cost.calibrate import local_cpu
from rematic.cost.devices import Device, gpu_like
from rematic.cost.profile import StepProfile
from rematic.cost.step_trace import Batch
from rematic.cost.tracer import MakeBatch, TraceSettings, trace_profile
from rematic.cost.unit_kinds import kind_of
from rematic.policy import Action

T = TypeVar("T")

MAX_REMEMBERED = 16
"""Profiles that the process remembers; a model built again is not traced again."""

STACK_BYTES = 2 * 2**20
"""Stack of the thread that traces: the usual 8 MiB stay mapped and count where data are limited."""

_remembered: OrderedDict[Hashable, StepProfile] = OrderedDict()


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What sets apart steps that need a profile of their own."""

    batch: int
    """Sequences."""

    padded: bool
    """Whether a mask hides some tokens."""

    accumulates: bool
    """Whether gradients are there when the step begins."""

    inputs: tuple[tuple[str, int], ...]
    """Names of what the batch holds, and the number of dimensions of each."""

    autocast: torch.dtype | None = None
    """What autocast computes in; None without it."""


class NotTraceableError(ValueError):
    """Steps that no profile can be made of; the message says why."""


def batch_inputs(batch: object) -> tuple[tuple[str, int], ...]:
    """Returns what a batch of a language model holds; a bare tensor of ids is its own labels.

    Raises:
        NotTraceableError: If it is anything else.
    """
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch, "labels": batch}
    if not isinstance(batch, Mapping):
        raise NotTraceableError(f"a batch is a {type(batch).__name__}, not a mapping of tensors")
    given = {str(name): value for name, value in batch.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or value.is_nested or value.dim() not in (1, 2):
            raise NotTraceableError(f"a batch's {name!r} is no tensor of tokens or labels")
        if value.is_floating_point():
            raise NotTraceableError(f"a batch's {name!r} holds numbers that are not whole")
    if "labels" not in given:
        raise NotTraceableError("a batch has no labels, so the model computes no loss")
    return tuple((name, value.dim()) for name, value in given.items())


def transformers_model(model: nn.Module) -> nn.Module:
    """Returns the model of transformers in a model: itself, or its one part that is one.

    Raises:
        NotTraceableError: If there is none, or more than one.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not hasattr(getattr(module, "config", None), "model_type"):
            continue
        inside.update(map(id, module.modules()))
        found.append(module)
    if len(found) != 1:
        raise NotTraceableError(f"it holds {len(found)} models of transformers, not one")
    return found[0]


def trace_live(
    model: nn.Module, kind: StepKind, *, actions: Sequence[Action], patterns: Sequence[str]
) -> StepProfile:
    """Returns what steps of one kind cost, at every length.

    Runs in a thread of its own, where no mode of the training is in force, and leaves every
    generator as it was. No weight is read or copied.

    Args:
        model: The model, attached or not.
        kind: The kind of steps.
        actions: Actions to trace.
        patterns: Patterns that name the units.

    Raises:
        NotTraceableError: If the model is none of transformers.
        Exception: Whatever the model raises in the trace.
    """
    traced = transformers_model(model)
    key = (_fingerprint(traced), kind, tuple(actions), tuple(patterns), _device(model).type)
    if key not in _remembered:
        settings = TraceSettings(
            make_batch=_make_batch(kind),
            actions=tuple(actions),
            batch=kind.batch,
            padded=(kind.padded,),
            patterns=tuple(patterns),
            autocast=kind.autocast,
            accumulates=kind.accumulates,
            on_accelerator=_device(model).type != "cpu",
        )
        _remembered[key] = _apart(lambda: trace_profile(traced, settings))
        while len(_remembered) > MAX_REMEMBERED:
            _remembered.popitem(last=False)
    _remembered.move_to_end(key)
    return _remembered[key]


def live_device(model: nn.Module) -> Device:
    """Returns what the device of a model can do.

    Raises:
        NotTraceableError: If it is a GPU that is not in the catalogue.
    """
    device = _device(model)
    if device.type == "cpu":
        return _apart(local_cpu)
    name = torch.cuda.get_device_name(device)
    try:
        return gpu_like(name)
    except ValueError as error:  # it says what to do at a command line, and here is none
        raise NotTraceableError(f"the speed of a {name} is not known") from error


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _apart(work: Callable[[], T]) -> T:
    """Runs in a thread of its own: modes, autocast and hooks of a training are per thread."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    put_back = save_generators()
    try:
        thread = threading.Thread(target=run, name="rematic-trace", daemon=True)
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
        thread.join()
    finally:
        put_back()
    if errors:
        raise errors[0]
    return results[0]


def _make_batch(kind: StepKind) -> MakeBatch:
    def make(batch: int, length: int, padded: bool) -> Batch:
        made = {}
        for name, num_dims in kind.inputs:
            ones = torch.ones(batch, *(length,) * (num_dims - 1), dtype=torch.int64)
            if name == "attention_mask" and padded:
                ones[0, length - max(1, length // 4) :] = 0
            elif name == "position_ids":
                ones = torch.arange(length).expand(batch, length).contiguous()
            elif name == "token_type_ids" or num_dims == 1:
                ones = torch.zeros_like(ones)
            made[name] = ones
        return made

    return make


def _fingerprint(model: nn.Module) -> Hashable:
    """Returns what must be equal for two models to cost the same."""
    buffers = tuple((name, tuple(b.shape), b.dtype) for name, b in model.named_buffers())
    return (kind_of(model), buffers, str(getattr(model, "config", None)))
