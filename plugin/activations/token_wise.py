"""Proves on a tiny input that a module treats every position of a sequence by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rematic.activations.ambient import AmbientState, applied, capture_ambient, generators_moved
from rematic.activations.kept_values import same_contents, version_of
from rematic.activations.module_state import ModuleState
from rematic.activations.nested import Nested, iter_leaves, map_leaves
from rematic.activations.tile import run_in_tiles, sequence_length
from rematic.memory import is_out_of_memory

NUM_POSITIONS = 6
"""Positions of the example that are looked at."""
_ROUNDINGS = {torch.float64: 64, torch.float32: 64}
"""Values of whole and sliced calls may differ by so many roundings (4 in 16 bits) of the largest
value: kernels choose another order of sums for another number of rows. Gradients must be exact."""


def is_token_wise(
    module: nn.Module,
    example_args: tuple[Nested, ...],
    example_kwargs: Mapping[str, Nested] | None = None,
    *,
    dim: int = 1,
) -> bool:
    """Returns whether the module may run in slices along `dim`; see `objection_to_tiles`."""
    return objection_to_tiles(module, example_args, example_kwargs, dim=dim) is None


def objection_to_tiles(
    module: nn.Module,
    example_args: tuple[Nested, ...],
    example_kwargs: Mapping[str, Nested] | None = None,
    *,
    dim: int = 1,
    forward: Callable[..., Nested] | None = None,
) -> str | None:
    """Says why the module must not run in slices along `dim`, None if it may.

    The first positions of the example are run whole and in slices, with each position changed in
    turn, and backward from each position in turn. The module passes if output i has the value it
    has in the whole call, does not move when another position does, and has a gradient that is
    exactly 0 at every other position. Refused as well: random numbers (dropout that is active: its
    slices would draw others than the whole call), buffers or attributes that forward changes,
    inputs changed in place, outputs without the sequence.

    Nothing is left behind: generators, buffers, attributes and gradients are as before. What was
    seen is true of the example; a module that looks at other positions only sometimes (experts with
    a capacity that overflows) can pass.

    Args:
        module: The module, in the mode in which it will run.
        example_args: Arguments of a call, of any length from 2; a real batch will do.
        example_kwargs: Its keyword arguments.
        dim: The dimension of the sequence, counted from the end if negative.
        forward: What to call; `module.forward` by default, so that hooks do not see the check.

    Raises:
        ValueError: If the arguments cannot be sliced along `dim`.
    """
    length = sequence_length(example_args, example_kwargs or {}, dim=dim)
    if length < 2:
        raise ValueError(f"the example has {length} position: expected 2 or more")
    trial = _Trial(forward or module.forward, dim, min(length, NUM_POSITIONS))
    state = ModuleState(module, None)
    tensors = list(iter_leaves((example_args, dict(example_kwargs or {}))))
    devices = {tensor.device for tensor in (*tensors, *state.tensors())}
    ambient = capture_ambient(
        tuple(sorted((d for d in devices if d.type != "cpu"), key=str)), tuple(state.generators)
    )
    call = _tiny((example_args, dict(example_kwargs or {})), dim, trial.length)
    with applied(ambient), state.replayed(), torch.enable_grad():
        try:
            return next(_objections(trial, call, state, ambient), None)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"it fails on a part of the sequence: {error}"


@dataclass(frozen=True)
class _Trial:
    """What is asked, and how long the tiny input is."""

    forward: Callable[..., Nested]
    dim: int
    length: int

    def whole(self, call: Any) -> list[torch.Tensor]:
        """Runs the tiny call and returns the tensors of its output."""
        return list(iter_leaves(self.forward(*call[0], **call[1])))

    def tiled(self, call: Any, num_tiles: int) -> list[torch.Tensor]:
        """Runs the tiny call in slices."""
        output = run_in_tiles(self.forward, *call, num_tiles=num_tiles, dim=self.dim)
        return list(iter_leaves(output))


def _objections(
    trial: _Trial, call: Any, state: ModuleState, ambient: AmbientState
) -> Iterator[str]:
    inputs = list(iter_leaves(call))
    versions = [version_of(tensor) for tensor in inputs]
    whole = trial.whole(call)
    if generators_moved(ambient):
        yield "it draws random numbers, and slices would draw others (set dropout to 0)"
    changed = _changed_state(state)
    if changed is not None:
        yield f"its forward changes its {changed}"
    if [version_of(tensor) for tensor in inputs] != versions:
        yield "it changes its input in place"
    if not whole:
        yield "its output holds no tensor"
    yield from _differences_of_slices(trial, call, whole)
    yield from _movements(trial, call, whole)
    yield from _leaking_gradients(trial, inputs, whole)


def _differences_of_slices(trial: _Trial, call: Any, whole: list[torch.Tensor]) -> Iterator[str]:
    for num_tiles in (2, trial.length):
        tiled = trial.tiled(call, num_tiles)
        if [(t.shape, t.dtype) for t in tiled] != [(t.shape, t.dtype) for t in whole]:
            yield "slices give outputs of another shape or type"
        elif not all(_close(a, b) for a, b in zip(tiled, whole, strict=True)):
            yield "slices give other values: it depends on the position or on other positions"


def _movements(trial: _Trial, call: Any, whole: list[torch.Tensor]) -> Iterator[str]:
    for moved in range(trial.length):
        others = [i for i in range(trial.length) if i != moved]

        def move(tensor: torch.Tensor, moved: int = moved) -> torch.Tensor:
            return _with_other_position(tensor, trial.dim, moved) if tensor.ndim else tensor

        outputs = trial.whole(map_leaves(move, call))
        for before, after in zip(whole, outputs, strict=True):
            kept = [t.movedim(trial.dim, 0)[others] for t in (before, after)]
            if not _close(*kept):
                yield f"changing position {moved} of its input changes other positions"


def _leaking_gradients(
    trial: _Trial, inputs: list[torch.Tensor], whole: list[torch.Tensor]
) -> Iterator[str]:
    sources = [tensor for tensor in inputs if tensor.requires_grad and tensor.ndim]
    for output in whole:
        if not output.requires_grad or not sources:
            continue
        # not ones: the features of a norm's output add up to a constant
        weights = torch.cos(torch.arange(1, output.numel() + 1, device=output.device))
        weighted = output * weights.view(output.shape).to(output.dtype)
        for position in range(trial.length):
            target = weighted.select(trial.dim, position).sum()
            found = torch.autograd.grad(target, sources, retain_graph=True, allow_unused=True)
            if any(_reaches_others(gradient, trial.dim, position) for gradient in found):
                yield f"the gradient of position {position} reaches other positions"


def _reaches_others(gradient: torch.Tensor | None, dim: int, position: int) -> bool:
    if gradient is None:  # this input has no part in it
        return False
    elsewhere = gradient.movedim(dim, 0).clone()
    elsewhere[position] = 0
    return bool(elsewhere.any())


def _tiny(call: Any, dim: int, length: int) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.detach().narrow(dim, 0, length) if tensor.ndim else tensor.detach()
        part = part.clone().requires_grad_(part.is_floating_point())
        return part.clone()  # no leaf: one may be changed in place, which the versions show

    return map_leaves(cut, call)


def _with_other_position(tensor: torch.Tensor, dim: int, position: int) -> torch.Tensor:
    changed = tensor.detach().clone()
    place = changed.select(dim, position)
    neighbour = changed.select(dim, (position + 1) % changed.shape[dim])
    if changed.is_floating_point():
        place.mul_(-3.0).add_(1.0)
    else:
        place.copy_(neighbour)  # a value that is legal here, whatever it means
    return changed.requires_grad_(tensor.requires_grad)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.detach(), b.detach()
    if not a.numel():
        return True
    largest = float(b.abs().max())
    tolerance = _ROUNDINGS.get(a.dtype, 4) * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _changed_state(state: ModuleState) -> str | None:
    for tensor in state.tensor_states:
        now = tensor.home.get(tensor.name)
        if tensor.clone is None:
            changed = now is not None
        else:
            changed = now is None or not torch.equal(now, tensor.clone)
        if changed:
            return f"buffer {tensor.full_name!r}"
    for module, values in state.attributes:
        for name, value in values.items():
            if module.__dict__.get(name) != value:
                return f"attribute {name!r}"
    for container in state.containers:
        if not same_contents(container.contents, container.home.get(container.name)):
            return f"attribute {container.name!r}"
    for held in state.objects:
        if held.is_changed():
            return f"attribute {held.full_name!r}"
    return None
