"""Fails chosen ops, and tells what ops a step has: a mode with little to do at each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rematic
from rematic.activations.unit_forward import is_recording
from rematic.memory import ListVersions, changed_lists, load_compiler_now
from rematic.memory.storages import storages_of


@dataclass(frozen=True, kw_only=True)
class SurveyedOp:
    """One op of a step in which nothing failed."""

    name: str

    in_unit: bool
    """Whether the forward of a unit ran (not a replay of it)."""

    allocates: bool
    """Whether it returned memory that none of its arguments had."""


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Passes ops on, and counts changes of lists, which torch leaves uncounted under a mode."""

    def __init__(self) -> None:
        load_compiler_now()
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self._lists: dict[Any, tuple[int, ...]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and guarding against it doubles the time of a mode

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        lists = self._lists.get(func)
        if lists is None:
            lists = self._lists[func] = changed_lists(func)
        if not lists:
            return func(*args, **kwargs)
        versions = ListVersions(lists, args)
        output = func(*args, **kwargs)
        versions.count()
        return output


class FailingOps(_Counting):
    """Runs out of memory at chosen ops.

    Args:
        positions: Numbers of the ops, from 1, at which it does, each once.
        late: Whether the op runs first and its output is dropped, as with kernels that allocate
            when they have drawn random numbers or updated statistics already. An op that allocates
            nothing cannot fail then: the next one that does takes its place.
    """

    def __init__(self, positions: Iterable[int], *, late: bool = False) -> None:
        super().__init__()
        self._left = set(positions)
        self._late = late
        self.num_ops = 0
        self.num_ooms = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - what the dispatcher passes
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what an op returns
        """Runs one op, or fails."""
        self.num_ops += 1
        if self.num_ops not in self._left:
            return self._run(func, args, kwargs or {})
        self._left.remove(self.num_ops)
        if self._late:
            output = self._run(func, args, kwargs or {})
            if not _allocates(output, (args, kwargs)):
                self._left.add(self.num_ops + 1)
                return output
            del output
        self.num_ooms += 1
        del args, kwargs  # the traceback of the error keeps this frame
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate 2.00 MiB. Injected at op {self.num_ops}, {func}"
        )


class OpSurvey(_Counting):
    """Notes every op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[SurveyedOp] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - what the dispatcher passes
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what an op returns
        """Runs one op and notes it."""
        kwargs = kwargs or {}
        output = self._run(func, args, kwargs)
        self.ops.append(
            SurveyedOp(
                name=str(func),
                in_unit=is_recording() and not rematic.replaying(),
                allocates=_allocates(output, (args, kwargs)),
            )
        )
        return output


def _allocates(output: object, given: object) -> bool:
    known = {id(storage) for storage in storages_of(given)}
    return any(id(storage) not in known and storage.nbytes() for storage in storages_of(output))
