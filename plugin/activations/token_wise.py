"""Proves on a tiny input that a module treats every position of a sequence by itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rematic.activations.ambient import AmbientState, applied, capture_ambient, generators_moved
from rematic.activations.kept_values import version_of
from rematic.activations.module_state import ModuleState
from rematic.activations.nested import ContainerContents, Nested, iter_leaves, map_leaves
from rematic.activations.tile import run_in_tiles, sequence_length
from rematic.activations.tile_effects import EffectsOfCall, differing_rest, shared_memory
from rematic.memory import is_out_of_memory

NUM_POSITIONS = 6
"""Positions of the example that are looked at."""
_ROUNDINGS = {torch.float64: 64, torch.float32: 64}
"""Values of whole and sliced calls may differ by so many roundings (4 in 16 bits) of the largest
value: kernels choose another order of sums for another number of rows. Gradients must be exact."""
OTHER_GRADIENTS = "slices give other gradients: its backward depends on other positions"
_SHOWS_NOTHING = (
    "the batch shows nothing, since what it returns is empty, not finite, or at most positions "
    "independent of what it is given (padding)"
)


@dataclass(frozen=True, kw_only=True)
class Objection:
    """Why a module must not run in slices."""

    text: str
    """The reason."""

    is_final: bool = True
    """Whether another example, or a later call, cannot give another answer."""


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
    survey: Callable[[], Callable[[], str | None]] | None = None,
) -> Objection | None:
    """Says why the module must not run in slices along `dim`, None if it may.

    A few positions of the example are run whole and in slices, with each position changed in turn,
    and backward from each position in turn. The module passes if output i has the value it has in
    the whole call, moves when its own position does and not when another one does, and has a
    gradient that is exactly 0 at every other position; the gradients of all positions at once must
    be those of slices. Trainable parameters that are all zero (the
    last layer of a residual branch, a gate) would hide what training will show: others stand in.
    Refused as well: random numbers (dropout that is active: its slices would draw others than the
    whole call), buffers or attributes that forward changes, inputs changed in place, outputs
    without the sequence, that are no tensor and depend on it, or that share memory with each other,
    with an input or with a parameter (a change in place of one would be seen in the other).

    Where the first positions show nothing (padding), the last ones and those in the middle are
    asked. Nothing is left behind: generators, buffers, attributes and gradients are as before.
    What was seen is true of a few positions; a module that looks further away, or at other
    positions only sometimes (experts with a capacity that overflows), can pass. Slices of a whole
    call are compared by `objection_at_length`.

    Args:
        module: The module, in the mode in which it will run.
        example_args: Arguments of a call, of any length from 2; a real batch will do.
        example_kwargs: Its keyword arguments.
        dim: The dimension of the sequence, counted from the end if negative.
        forward: What to call; `module.forward` by default, so that hooks do not see the check.
        survey: Called before the first call; what it returns is called after it, and says what
            else it has done that forbids slices, None for nothing.

    Raises:
        ValueError: If the arguments cannot be sliced along `dim`.
    """
    length = sequence_length(example_args, example_kwargs or {}, dim=dim)
    if length < 2:
        raise ValueError(f"the example has {length} position: expected 2 or more")
    trial = _Trial(forward or module.forward, dim, min(length, NUM_POSITIONS), survey)
    state = ModuleState(module, None)
    tensors = list(iter_leaves((example_args, dict(example_kwargs or {}))))
    devices = {tensor.device for tensor in (*tensors, *state.tensors())}
    given = iter_leaves((example_args, dict(example_kwargs or {})), leaf=torch.Generator)
    ambient = capture_ambient(
        tuple(sorted((d for d in devices if d.type != "cpu"), key=str)),
        (*state.generators, *given),
    )
    last = length - trial.length
    objection: Objection | None = None
    for start in dict.fromkeys((0, last, last // 2)):
        with applied(ambient), state.replayed(), without_zeros(state), torch.enable_grad():
            call = (example_args, dict(example_kwargs or {}))
            objection = _answer(trial, call, start, state, ambient)
        if objection is None or objection.text != _SHOWS_NOTHING:
            break
    return objection


@dataclass(frozen=True)
class _Trial:
    """What is asked, and how long the tiny input is."""

    forward: Callable[..., Nested]
    dim: int
    length: int
    survey: Callable[[], Callable[[], str | None]] | None

    def whole(self, call: Any) -> Nested:
        """Runs the tiny call."""
        return self.forward(*call[0], **call[1])

    def tiled(self, call: Any, num_tiles: int) -> Nested:
        """Runs the tiny call in slices."""
        return run_in_tiles(self.forward, *call, num_tiles=num_tiles, dim=self.dim)


def _answer(
    trial: _Trial, call: Any, start: int, state: ModuleState, ambient: AmbientState
) -> Objection | None:
    try:
        tiny = _tiny(call, trial.dim, start, trial.length)
        return next(_objections(trial, tiny, state, ambient), None)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return Objection(text=f"it fails on a part of the sequence: {error}")


def _objections(
    trial: _Trial, call: Any, state: ModuleState, ambient: AmbientState
) -> Iterator[Objection]:
    inputs = list(iter_leaves(call))
    versions = [version_of(tensor) for tensor in inputs]
    effects, given = EffectsOfCall(state), ContainerContents((*call[0], *call[1].values()))
    change_outside = None if trial.survey is None else trial.survey()
    output = trial.whole(call)
    whole = list(iter_leaves(output))
    if generators_moved(ambient):
        yield Objection(text="it draws random numbers, and slices would draw others")
    changed = None if change_outside is None else change_outside()
    if changed is not None:
        yield Objection(text=f"its forward changes {changed}")
    if given.is_changed():
        yield Objection(text="it changes a list, a dictionary or a dataclass that it is given")
    changed = effects.change()
    if changed is not None:
        # many modules make something for good in their first call
        yield Objection(text=f"its forward changes {changed}", is_final=False)
    if [version_of(tensor) for tensor in inputs] != versions:
        yield Objection(text="it changes its input in place")
    if not whole:
        yield Objection(text="its output holds no tensor")
    if not all(map(_is_telling, whole)):
        yield Objection(text=_SHOWS_NOTHING, is_final=False)
    others = [*inputs, *state.tensors()]
    if shared_memory(whole, others):
        yield Objection(text="its outputs share memory, among themselves or with what it is given")
    for text in _differences_of_slices(trial, call, output):
        yield Objection(text=text)
    changed = effects.change()  # slices are shorter than what was called whole
    if changed is not None:
        yield Objection(text=f"its forward changes {changed}", is_final=False)
    yield from _leaking_gradients(trial, inputs, whole)
    if not have_same_gradients(trial.forward, call, num_tiles=2, dim=trial.dim):
        yield Objection(text=OTHER_GRADIENTS)
    yield from _movements(trial, call, whole)


def _are_telling(positions: set[int], length: int) -> bool:
    """Returns whether so many positions do something that it would be seen what they mix."""
    return len(positions) >= min(3, length) and any(i + 1 in positions for i in positions)


def _is_telling(output: torch.Tensor) -> bool:
    return output.numel() > 0 and (not output.is_floating_point() or bool(output.isfinite().all()))


def _differences_of_slices(trial: _Trial, call: Any, output: Nested) -> Iterator[str]:
    whole = list(iter_leaves(output))
    for num_tiles in (2, trial.length):
        sliced = trial.tiled(call, num_tiles)
        tiled = list(iter_leaves(sliced))
        if [(t.shape, t.dtype) for t in tiled] != [(t.shape, t.dtype) for t in whole]:
            yield "slices give outputs of another shape or type"
        elif not all(is_close(a, b) for a, b in zip(tiled, whole, strict=True)):
            yield "slices give other values: it depends on the position or on other positions"
        if differing_rest(output, sliced):
            yield "it returns something that is no tensor, and other for a slice than for all"


def _movements(trial: _Trial, call: Any, whole: list[torch.Tensor]) -> Iterator[Objection]:
    seen = set()
    for moved in range(trial.length):
        others = [i for i in range(trial.length) if i != moved]
        move = functools.partial(_with_other_position, dim=trial.dim, position=moved)
        outputs = list(iter_leaves(trial.whole(map_leaves(move, call))))
        for before, after in zip(whole, outputs, strict=True):
            a, b = (t.movedim(trial.dim, 0)[others] for t in (before, after))
            if not is_close(a, b):
                text = f"changing position {moved} of its input changes other positions"
                yield Objection(text=text)
        if not all(
            torch.equal(before.select(trial.dim, moved), after.select(trial.dim, moved))
            for before, after in zip(whole, outputs, strict=True)
        ):
            seen.add(moved)
    if not _are_telling(seen, trial.length):
        yield Objection(text=_SHOWS_NOTHING, is_final=False)


def _leaking_gradients(
    trial: _Trial, inputs: list[torch.Tensor], whole: list[torch.Tensor]
) -> Iterator[Objection]:
    sources = [tensor for tensor in inputs if tensor.requires_grad and tensor.ndim]
    seen: dict[int, set[int]] = {}  # positions with a gradient of their own, by source
    for output in whole:
        if not output.requires_grad or not sources:
            continue
        weighted = output * _weights_of(output)
        for position in range(trial.length):
            target = weighted.select(trial.dim, position).sum()
            found: Sequence[torch.Tensor | None] = torch.autograd.grad(
                target, sources, retain_graph=True, allow_unused=True
            )
            for i, gradient in enumerate(found):
                if gradient is None:  # this input has no part in it
                    continue
                if _reaches_others(gradient, trial.dim, position):
                    text = f"the gradient of position {position} reaches other positions"
                    yield Objection(text=text)
                reached = bool(gradient.select(trial.dim, position).any())
                seen.setdefault(i, set()).update([position] if reached else [])
    if not all(_are_telling(positions, trial.length) for positions in seen.values()):
        yield Objection(text=_SHOWS_NOTHING, is_final=False)


def have_same_gradients(
    forward: Callable[..., Nested], call: Any, *, num_tiles: int, dim: int
) -> bool:
    """Returns whether slices give inputs the gradients of the whole call, of all positions at once.

    (A backward need not be linear: a hook may divide a gradient by its norm.)
    """
    tiled, whole = (_gradients(forward, call, number, dim) for number in (num_tiles, 1))
    return len(tiled) == len(whole) and all(map(is_close, tiled, whole))


def _gradients(
    forward: Callable[..., Nested], call: Any, num_tiles: int, dim: int
) -> list[torch.Tensor]:
    made: Any = map_leaves(lambda t: t.detach().requires_grad_(t.is_floating_point()), call)
    sources = [tensor for tensor in iter_leaves(made) if tensor.requires_grad]
    outputs = list(iter_leaves(run_in_tiles(forward, *made, num_tiles=num_tiles, dim=dim)))
    outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if not outputs or not sources:
        return []
    weights = [_weights_of(tensor) for tensor in outputs]
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        outputs, sources, weights, allow_unused=True
    )
    return [gradient for gradient in found if gradient is not None]


def _weights_of(output: torch.Tensor) -> torch.Tensor:
    """Returns what is not ones, since the features of a norm's output add up to a constant."""
    numbers = torch.arange(1, output.numel() + 1, device=output.device)
    return torch.cos(numbers).view(output.shape).to(output.dtype)


def _reaches_others(gradient: torch.Tensor, dim: int, position: int) -> bool:
    elsewhere = gradient.movedim(dim, 0).clone()
    elsewhere[position] = 0
    return bool(elsewhere.any())


def _tiny(call: Any, dim: int, start: int, length: int) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.detach().narrow(dim, start, length) if tensor.ndim else tensor.detach()
        part = part.clone().requires_grad_(part.is_floating_point())
        return part.clone()  # no leaf: one may be changed in place, which the versions show

    return map_leaves(cut, call)


def _with_other_position(tensor: torch.Tensor, *, dim: int, position: int) -> torch.Tensor:
    if not tensor.ndim:
        return tensor
    changed = tensor.detach().clone()
    place = changed.select(dim, position)
    neighbour = changed.select(dim, (position + 1) % changed.shape[dim])
    if changed.is_floating_point():
        place.mul_(-3.0).add_(1.0)
    else:
        place.copy_(neighbour)  # a value that is legal here, whatever it means
    return changed.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def without_zeros(state: ModuleState) -> Iterator[None]:
    """Lets other parameters stand in the body for those trainable ones that are all zero."""
    instead: dict[int, nn.Parameter] = {}
    replaced = []
    for known in state.parameters:
        parameter = known.tensor
        if id(parameter) not in instead and _is_all_zero(parameter):
            pattern = 0.1 * torch.cos(
                torch.arange(1, parameter.numel() + 1.0, device=parameter.device)
            )
            instead[id(parameter)] = nn.Parameter(pattern.view(parameter.shape).to(parameter.dtype))
        if id(parameter) in instead:
            replaced.append((known.home, known.name, parameter))
    try:
        for home, name, parameter in replaced:
            home[name] = instead[id(parameter)]
        yield
    finally:
        for home, name, parameter in replaced:
            home[name] = parameter


def _is_all_zero(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.is_floating_point()
        and not parameter.is_meta
        and parameter.numel() > 0
        and not bool(parameter.detach().any())
    )


def is_close(a: torch.Tensor, b: torch.Tensor, largest: float | None = None) -> bool:
    """Returns whether two outputs are equal but for some roundings of the largest value of `b`."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.detach(), b.detach()
    if not a.numel():
        return True
    largest = float(b.abs().max()) if largest is None else largest
    tolerance = _ROUNDINGS.get(a.dtype, 4) * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
