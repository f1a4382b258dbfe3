"""The ops of one stretch of a step: what each makes, computes, touches, and when that is freed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rematic.activations.selective import is_random
from rematic.memory.storages import storages_of

_SILENT = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh", "prim::device"})


@dataclass(kw_only=True)
class LoggedOp:
    """One op at one shape; the fields are those of `rematic.planner.unit_costs.OpCost`."""

    name: str
    occurrence: int
    result_bytes: int
    flops: int
    touched_bytes: int
    dtype: str
    storage_of: int | None
    is_in_place: bool
    is_random: bool
    is_saved: bool = False
    freed_after: int | None = None


class OpLog:
    """Takes down ops in order, and which of them made the storages that are alive."""

    def __init__(self) -> None:
        self.ops: list[LoggedOp] = []
        self._seen: Counter[str] = Counter()
        self._makers: dict[int, int] = {}
        self.is_open = True
        """Whether what dies still counts as freed inside the stretch."""

    @staticmethod
    def is_silent(func: Any) -> bool:  # noqa: ANN401
        """Returns whether an op is none of the model's: it only makes another alias."""
        return func._schema.name in _SILENT

    def note(
        self,
        func: Any,  # noqa: ANN401 - whatever the dispatcher passes
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,  # noqa: ANN401
    ) -> None:
        """Takes down one op, as an observer of the event log."""
        if self.is_silent(func):
            return
        name = func._schema.name
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        given = {id(storage) for storage in storages_of((args, kwargs))}
        made = {id(s): s.nbytes() for s in storages_of(outputs) if id(s) not in given}
        in_place = bool(func._schema.is_mutable)
        is_view = not made and not in_place  # whatever the schema says: `_unsafe_view`
        makers = [self._makers[key] for s in storages_of(outputs) if (key := id(s)) in self._makers]
        self._makers.update(dict.fromkeys(made, len(self.ops)))
        self.ops.append(
            LoggedOp(
                name=name,
                occurrence=self._seen[name],
                result_bytes=sum(made.values()),
                flops=_flops(func, args, kwargs, output),
                touched_bytes=0 if is_view else _touched_bytes(args, kwargs, outputs),
                dtype=_dtype(args, outputs),
                storage_of=makers[0] if makers and not made else None,
                is_in_place=in_place,
                is_random=is_random(func, args, kwargs),
            )
        )
        self._seen[name] += 1

    def note_death(self, key: int) -> None:
        """Takes down that a storage died."""
        maker = self._makers.pop(key, None)
        if maker is not None and self.is_open:
            self.ops[maker].freed_after = len(self.ops) - 1

    def note_saved(self, tensors: list[torch.Tensor]) -> None:
        """Takes down whose storages autograd saves."""
        for storage in storages_of(tensors):
            if id(storage) in self._makers:
                self.ops[self._makers[id(storage)]].is_saved = True


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:  # noqa: ANN401
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=output))
    name = func._schema.name
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        query, key, value = args[:3]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        return 2 * int(pairs * (query.shape[-1] + value.shape[-1]))
    if name == "aten::_grouped_mm":
        left, right = args[:2]
        return 2 * int(left.numel() * right.shape[-1])
    return 0


def _touched_bytes(args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:  # noqa: ANN401
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in (*inputs, *outputs))


def _dtype(args: Any, outputs: list[torch.Tensor]) -> str:  # noqa: ANN401
    # what an op computes in is what it reads: comparisons and casts return something else
    inputs = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
    floats = [t for t in (*inputs, *outputs) if t.dtype.is_floating_point]
    chosen = floats or inputs or outputs
    return str(chosen[0].dtype).removeprefix("torch.") if chosen else "float32"
