"""Counts in-place changes of lists of tensors, which dispatch modes keep torch from counting.

Under a `TorchDispatchMode` the ops that change lists in place (`_foreach_add_`, `_fused_adamw_`)
leave the in-place counters of the tensors alone (torch 2.13), so that a graph over weights that
were updated meanwhile would give wrong gradients without an error. A mode calls this around them;
delete it when torch counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def changed_lists(func: Any) -> tuple[int, ...]:  # noqa: ANN401 - an op of the dispatcher
    """Returns the positions of the arguments of `func` that are lists it changes in place."""
    if not func._schema.is_mutable:
        return ()
    return tuple(
        i
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and str(argument.type) == "List[Tensor]"
    )


class ListVersions:
    """In-place counters of the lists that an op is about to change.

    Args:
        positions: What `changed_lists` said of the op.
        args: Its positional arguments.
    """

    def __init__(self, positions: Sequence[int], args: Sequence[Any]) -> None:
        self._before = [(tensor, tensor._version) for tensor in _tensors(positions, args)]

    def count(self) -> None:
        """Counts the change where torch has not."""
        for tensor, version in self._before:
            if tensor._version == version:
                torch.autograd.graph.increment_version(tensor)


def _tensors(positions: Sequence[int], args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for position in positions:
        if position < len(args):
            yield from (tensor for tensor in args[position] if not tensor.is_inference())
