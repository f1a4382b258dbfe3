"""What an op on fake tensors returns, remembered by what it is given.

`FakeTensorMode` has a cache of its own, but its keys cost more than the answer (torch 2.13: half of
the time of a trace). Units of one kind run the same ops on the same shapes over and over.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rematic.cost.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily

_CPU = torch.device("cpu")
_PLAIN = frozenset(
    {int, float, bool, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_UNFIT_TAGS = frozenset(
    {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
)


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an op returns."""

    given: int | None
    """Position of the tensor it was given that it returns, or a view of it; None: a new one."""

    is_view: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


_Results = tuple["_Result | None", ...]


class ShapeCache:
    """Remembers what ops return.

    Args:
        fake_mode: Makes the fake tensors.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._known: dict[Hashable, tuple[type, _Results]] = {}

    def call(
        self,
        func: Any,  # noqa: ANN401 - whatever the dispatcher passes
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:  # noqa: ANN401
        """Returns what an op returns.

        Args:
            func: The op.
            args: What it is given.
            kwargs: The same, by name.
            tensors: The tensors among both, in order.
        """
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            kind, results = known
            made = [self._make(result, tensors) for result in results]
            return kind(made) if kind in (tuple, list) else made[0]
        output = func(*args, **kwargs)
        results_or_none = _results(output, tensors)
        if results_or_none is not None:
            self._known[key] = (type(output), results_or_none)
        return output

    def _make(self, result: _Result | None, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401
        if result is None:
            return None
        if result.given is not None and not result.is_view:
            return tensors[result.given]
        with unset_fake_temporarily():
            if result.given is None:
                made = torch.empty_strided(
                    result.shape, result.stride, dtype=result.dtype, device="meta"
                )
            else:
                storage = tensors[result.given].untyped_storage()
                made = torch.empty(0, dtype=result.dtype, device="meta")
                made.set_(storage, result.offset, result.shape, result.stride)
            return FakeTensor(self._fake_mode, made, _CPU)


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:  # noqa: ANN401
    """Returns what decides what an op returns; None if that cannot be told."""
    if func.tags and not _UNFIT_TAGS.isdisjoint(func.tags):
        return None
    key: list[Hashable] = [func]
    for value in args:
        if not _add(key, value):
            return None
    for name, value in kwargs.items():
        key.append(name)
        if not _add(key, value):
            return None
    return tuple(key)


def _add(key: list[Hashable], value: object) -> bool:
    """Adds what matters of one argument; returns whether that is all of it."""
    kind = type(value)
    if kind is FakeTensor:
        assert isinstance(value, FakeTensor)
        if value.constant is not None or value.dtype.is_complex or value.is_sparse:
            return False
        key += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        return True
    if kind is list or kind is tuple:
        assert isinstance(value, (list, tuple))
        key.append(len(value))
        return all(_add(key, item) for item in value)
    key += (kind, value)  # type: ignore[arg-type] # is hashable, as the next line says
    return kind in _PLAIN


def _results(output: object, tensors: Sequence[torch.Tensor]) -> _Results | None:
    """Returns how to make the output again; None if that cannot be told."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    found: list[_Result | None] = []
    made: set[int] = set()
    for value in values:
        if value is None:
            found.append(None)
            continue
        if type(value) is not FakeTensor or value.fake_device != _CPU:
            return None
        result = _result(value, tensors)
        key = value.untyped_storage()._cdata
        if result is None or (result.given is None and key in made):
            return None
        made.add(key)
        found.append(result)
    return tuple(found)


def _result(value: torch.Tensor, tensors: Sequence[torch.Tensor]) -> _Result | None:
    storage = value.untyped_storage()
    given = None
    for position, tensor in enumerate(tensors):
        if tensor is value:
            return _Result(position, False, (), (), 0, value.dtype)
        if given is None and tensor.untyped_storage()._cdata == storage._cdata:
            given = position
    shape, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
    if given is None and (offset or storage.nbytes() != _least_bytes(value)):
        return None
    return _Result(given, given is not None, shape, stride, offset, value.dtype)


def _least_bytes(value: torch.Tensor) -> int:
    if value.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()
