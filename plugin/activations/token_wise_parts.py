"""Runs the token-wise parts of a unit in slices while the unit itself runs whole.

A block holds attention and is not token-wise, its MLP and its norms are. In a record whose body is
a `BodyInSlices` each slice of such a part is a checkpoint of its own: its inputs are slots of the
record, what happens inside of it is computed again when backward comes to that slice. So neither
forward nor a replay of the unit ever holds the inside of a whole part.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from rematic.activations import torch_private
from rematic.activations.ambient import capture_ambient, generators_moved, restore_generators
from rematic.activations.checkpointed_tiles import (
    hooks_of_its_own,
    is_worth_tiles,
    run_in_checkpointed_tiles,
)
from rematic.activations.compiled import is_compiled
from rematic.activations.nested import iter_leaves, iter_others
from rematic.activations.record import Record
from rematic.activations.replay import ReplayError, announced_as_replay
from rematic.activations.tile import Call, sequence_length
from rematic.activations.tile_proof import TileProof
from rematic.memory import is_out_of_memory

if TYPE_CHECKING:
    from rematic.activations.unit import Unit

NUM_TILES = 8
"""Slices of a part. The inside of an MLP is three to four times as wide as what it is given, some
tensors of it at once: of an eighth of the positions it takes about as much as its whole input."""
_DIM = 1
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule)
PartsMode: TypeAlias = Literal["whole", "asked", "sliced"]
"""How the parts of units run."""
_Way: TypeAlias = Literal["whole", "in slices", "in slices, then whole"]


class TokenWiseParts:
    """What is known of the parts of one unit, the unit itself included."""

    def __init__(self) -> None:
        self.only_asks = True
        """Whether parts are asked in the next records, and run whole."""
        self._proofs: weakref.WeakKeyDictionary[nn.Module, TileProof] = weakref.WeakKeyDictionary()
        self._worth: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        """Whether slices of a part that was proved save memory; nothing while that is not known."""
        self._told: set[str] = set()

    @property
    def were_asked(self) -> bool:
        """Whether some part was."""
        return len(self._proofs) > 0

    @property
    def are_known(self) -> bool:
        """Whether some part was proved to be token-wise, and not to need as much in slices."""
        parts = [part for part, proof in self._proofs.items() if proof.is_given(part)]
        return any(self._worth.get(part, True) for part in parts)

    def body(self, forward: Callable[..., Any], unit: Unit) -> BodyInSlices:
        """Returns what the next record of the unit runs.

        Args:
            forward: The forward of the unit.
            unit: The unit.
        """
        return BodyInSlices(forward, unit, self, only_asks=self.only_asks)

    def is_refused(
        self, unit: Unit, part: nn.Module, forward: Callable[..., Any], call: Call
    ) -> bool:
        """Returns whether a call of a part must run whole, by a proof on it."""
        proof = self._proofs.get(part)
        if proof is None:
            proof = self._proofs[part] = TileProof(_DIM)
        was_given = proof.is_given(part)
        try:
            # of its own: what the proof saves is no slot of the record whose forward runs
            with hooks_of_its_own():
                refused = proof.objection(unit, part, forward, call) is not None
                if not refused and not (was_given and part in self._worth):
                    self._worth.pop(part, None)  # of another mode, if at all
                    self._worth[part] = is_worth_tiles(part, forward, call, dim=_DIM)
                if refused or not self._worth[part]:
                    return True
                found = proof.objection_at_length(
                    unit,
                    part,
                    forward,
                    call,
                    num_tiles=NUM_TILES,
                    may_be_partial=not self.only_asks,
                )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return True  # the next call is asked
        return found is not None

    def refuse(self, part: nn.Module) -> None:
        """Takes note that a part drew random numbers although it was proved not to."""
        self._proofs[part].refuse(part)

    def tell(self, unit: Unit, name: str) -> None:
        """Tells the journal, once, that a part runs in slices."""
        if name not in self._told:
            self._told.add(name)
            what = f"its part {name!r} runs" if name else "it runs"
            unit.tell("tile", f"{what} in slices: gradients of its weights are summed by slice")


class BodyInSlices:
    """What a record runs while parts of its unit run in slices, or are asked whether they may.

    Made for one record and called by it alone: replays do what forward did.

    Args:
        forward: The forward of the unit.
        unit: The unit.
        parts: What is known of its parts.
        only_asks: Whether parts are asked and run whole.
    """

    def __init__(
        self, forward: Callable[..., Any], unit: Unit, parts: TokenWiseParts, *, only_asks: bool
    ) -> None:
        self._forward = forward
        self._unit = unit
        self._parts = parts
        self._only_asks = only_asks
        self._record: weakref.ref[Record] | None = None
        self._ways: list[_Way] = []
        self._is_recorded = False
        self._position = 0
        self._top_hooks: object = None
        self._plain: dict[nn.Module, Any] = {}
        """What `forward` of the instance is without this body, None for that of the class."""

    def belong_to(self, record: Record) -> None:
        """Takes note of the record whose body it is, which it does not keep alive."""
        self._record = weakref.ref(record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the unit's forward."""
        self._position = 0
        if self._is_recorded and all(way == "whole" for way in self._ways):
            return self._forward(*args, **kwargs)
        self._top_hooks = torch_private.top_saved_tensor_hooks()
        module, parts = self._unit.module, dict(_parts_of(self._unit))
        self._plain = {part: part.__dict__.get("forward") for part in parts.values()}
        try:
            with _stand_in({part: self._around(name, part) for name, part in parts.items()}):
                output = self._run("", module, self._forward, args, kwargs)
        finally:
            self._top_hooks = None  # they know the record, whose body this is
        self._is_recorded = True
        return output

    def _around(self, name: str, part: nn.Module) -> Callable[..., Any]:
        forward = part.forward
        return lambda *args, **kwargs: self._run(name, part, forward, args, kwargs)

    def _run(
        self, name: str, part: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        way = self._way_of_forward() if self._is_recorded else None
        if way == "whole":
            return forward(*args, **kwargs)
        place = len(self._ways)
        if way is None:
            self._ways.append("whole")
            if not self._may_run_in_slices(part, forward, (args, kwargs)):
                return forward(*args, **kwargs)
            self._ways[place] = "in slices"
            self._parts.tell(self._unit, name)
        devices = {tensor.device for tensor in iter_leaves((args, kwargs)) if not tensor.is_cpu}
        ambient = capture_ambient(tuple(sorted(devices, key=str)))
        with _stand_in(self._plain):
            output = self._in_slices(forward, (args, kwargs))
        if way is None and generators_moved(ambient):
            # dropout that was turned on since: as if the slices had not run, here and in replays
            self._ways[place] = way = "in slices, then whole"
            self._parts.refuse(part)
        if way != "in slices, then whole":
            return output
        del output
        restore_generators(ambient)
        return forward(*args, **kwargs)

    def _way_of_forward(self) -> _Way:
        if self._position >= len(self._ways):
            raise ReplayError(
                f"the replay of unit {self._unit.name!r} calls more parts of it than its forward "
                f"did: expected {len(self._ways)}. Keep this unit with a rule whose action is "
                "`keep`."
            )
        self._position += 1
        return self._ways[self._position - 1]

    def _may_run_in_slices(self, part: nn.Module, forward: Callable[..., Any], call: Call) -> bool:
        if any(True for _ in iter_others(call)):
            return False  # the proof might change it
        hides = torch_private.top_saved_tensor_hooks() != self._top_hooks
        if hides or torch_private.inside_function_transform() or not torch.is_grad_enabled():
            return False  # a checkpoint of its own inside the unit would run it whole again
        try:
            if sequence_length(*call, dim=_DIM) < 2:
                return False
        except ValueError:
            return False
        with _stand_in(self._plain):
            refused = self._parts.is_refused(self._unit, part, forward, call)
        return not refused and not self._only_asks

    def _in_slices(self, forward: Callable[..., Any], call: Call) -> Any:
        record = None if self._record is None else self._record()
        assert record is not None, "it runs its body"
        return run_in_checkpointed_tiles(
            forward, call, num_tiles=NUM_TILES, dim=_DIM, again=functools.partial(_again, record)
        )


@contextlib.contextmanager
def _again(record: Record) -> Iterator[None]:
    """Shows a slice that is computed again what forward saw."""
    with announced_as_replay(), record.module_state.replayed():
        yield


def _parts_of(unit: Unit) -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts of a unit that may be worth slices: all but single ops of torch."""
    routers = set() if unit.routing is None else unit.routing.modules()
    for name, part in unit.module.named_modules():
        is_single_op = type(part).__module__.startswith("torch.nn.") and not part._modules
        if not name or is_single_op or isinstance(part, _WITHOUT_FORWARD) or is_compiled(part):
            continue
        if routers.isdisjoint(part.modules()):  # whose decisions slices would not keep
            yield name, part


@contextlib.contextmanager
def _stand_in(forwards: dict[nn.Module, Any]) -> Iterator[None]:
    """Puts other callables in the place of the `forward` of modules; None for that of the class."""
    before = {part: part.__dict__.get("forward") for part in forwards}
    _put(forwards)
    try:
        yield
    finally:
        _put(before)


def _put(forwards: dict[nn.Module, Any]) -> None:
    for part, forward in forwards.items():
        if forward is not None:
            part.__dict__["forward"] = forward
        else:
            part.__dict__.pop("forward", None)
