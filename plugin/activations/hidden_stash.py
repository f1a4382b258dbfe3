"""Finds what a unit's graph keeps without saving it: declared against measured bytes.

An autograd function can hold tensors as attributes of its `ctx` (LLM.int8 of bitsandbytes does).
Saved-tensor hooks never see them, so no eviction reaches them while the graph lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from rematic.activations.nested import iter_leaves, map_leaves
from rematic.activations.record import Record
from rematic.activations.replay import as_in_forward
from rematic.memory import SimulatedProbe, is_out_of_memory

MIN_HIDDEN_BYTES = 1 << 14
"""Hidden bytes below which a unit is left as it is."""
MIN_HIDDEN_SHARE = 0.05
"""The same, as a share of what it declares."""


@dataclass(frozen=True, kw_only=True)
class HiddenStash:
    """What the graph of a unit holds beside the tensors that it saved."""

    hidden_bytes: int
    """Bytes that die with the graph although nothing saved is held."""

    declared_bytes: int
    """Bytes of the tensors that forward saved, external ones not counted."""

    is_closed: bool
    """Whether gradients flow to arguments and parameters alone, so that the graph can be made again
    from these."""

    @property
    def matters(self) -> bool:
        """Whether it is worth a record without a graph."""
        floor = max(MIN_HIDDEN_BYTES, MIN_HIDDEN_SHARE * self.declared_bytes)
        return self.hidden_bytes >= floor

    @property
    def text(self) -> str:
        """What the log says of it."""
        remedy = "it is recomputed without a graph"
        if not self.is_closed:
            remedy = "it cannot be let go, since gradients flow to tensors from elsewhere"
        return (
            f"its graph holds {self.hidden_bytes:,} bytes that it does not save "
            f"(and saves {self.declared_bytes:,}); where it does not start in memory {remedy}"
        )


def find_hidden_stash(record: Record) -> HiddenStash | None:
    """Runs the forward of a record once more, holding nothing that it saves, and measures.

    Returns:
        None if it cannot run like that (it differentiates inside itself).

    Raises:
        RuntimeError: If memory runs out, which proves nothing.
    """
    probe = _Counting()
    declared = record.own_bytes()
    try:
        with (
            as_in_forward(record, cached=False) as (args, kwargs),
            saved_tensors_hooks(_hold_nothing, _refuse),
            probe,
        ):
            output = record.forward(*args, **kwargs)
            known = [*iter_leaves((args, kwargs))]
            known += [state.tensor for state in record.module_state.parameters]
            is_closed = _is_closed(output, known)
            with_graph = probe.allocated_bytes()
            output = map_leaves(torch.Tensor.detach, output)  # the graph dies here
            hidden = with_graph - probe.allocated_bytes()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    return HiddenStash(hidden_bytes=hidden, declared_bytes=declared, is_closed=is_closed)


class _Counting(SimulatedProbe):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts what lives; what is compiled inside of the unit stays compiled under it.

    (Attention that is written for a compiler would hold every score without it.)
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch's compiler work while it counts."""
        return True


def _hold_nothing(tensor: torch.Tensor) -> None:
    return None


def _refuse(packed: None) -> torch.Tensor:
    raise RuntimeError("nothing is held here")


def _is_closed(output: Any, known: list[torch.Tensor]) -> bool:
    """Returns whether every leaf of the output's graph is one of the tensors known."""
    allowed = {id(tensor) for tensor in known if tensor.is_leaf}
    roots = [t.grad_fn for t in iter_leaves(output) if t.grad_fn is not None]
    return all(id(variable) in allowed for variable in _leaves_of(roots))


def _leaves_of(roots: list[Node]) -> Iterator[torch.Tensor]:
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of nodes that accumulate a gradient
        if isinstance(variable, torch.Tensor):
            yield variable
        waiting += [following for following, _ in node.next_functions if following is not None]
