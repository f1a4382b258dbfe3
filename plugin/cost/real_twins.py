"""Fake tensors whose whole numbers are real, so that a trace takes the path of the real step.

Models ask their masks and ids questions (`.all()`, `.item()`, `nonzero`) and go another way by the
answer. A fake tensor has no answer. Here every integer or boolean tensor has a real twin: ops on
whole numbers alone are also run on the twins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from rematic.cost.shape_cache import ShapeCache
from rematic.cost.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily

_aten = torch.ops.aten
_MAX_ELEMENTS = 2**26
"""Larger twins are not made: what a model asks of them is then answered as below."""

_SHAPED_BY_VALUES = frozenset(
    {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive"}
    | {"aten::unique_dim", "aten::bincount", "aten::repeat_interleave"}
)
_RANDOM = torch.Tag.nondeterministic_seeded


class RealTwins(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Runs what concerns whole numbers for real, everything else on fake tensors.

    Entered above the `FakeTensorMode`. What depends on floating numbers is answered so: they are
    equal to each other, true nowhere and 1 as numbers, and a router sends the same number of tokens
    to every expert.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self._fake_mode = fake_mode
        self._cache = ShapeCache(fake_mode)
        self._twins = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiles here, and torch's (2.13) guard against that costs as much as an op.
        return False

    def fake(self, real: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor like `real`, with itself as the twin if it holds whole numbers."""
        fake = FakeTensor(
            self._fake_mode,
            torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta"),
            torch.device("cpu"),
        )
        if _is_whole(real) and real.device.type == "cpu":
            self._twins[fake] = real
        return fake

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - whatever the dispatcher passes
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Runs one op on the fake tensors, and on the twins where all its tensors have one."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        tensors = list(_given(args, kwargs))
        if func is _aten._local_scalar_dense.default:
            return self._number(tensors[0])
        if func is _aten.equal.default:
            return self._equal(*tensors)
        whole = all(map(_is_whole, tensors))
        twinned = whole and all(t in self._twins or type(t) is not FakeTensor for t in tensors)
        name = func._schema.name
        if twinned and whole and tensors and _is_shaped_by_values(func, name, args):
            return self._real_result(func, args, kwargs)
        if name == "aten::index" and _masks(args[1]):
            args = (args[0], self._positions(args[1]), *args[2:])
        output = self._on_fakes(func, args, kwargs, tensors)
        if name in ("aten::topk", "aten::sort") and not whole:
            self._spread(output[1], num_choices=int(tensors[0].shape[-1]))
        elif twinned and whole and _RANDOM not in func.tags:
            self._follow(func, args, kwargs, output)
        return output

    def _number(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - bool, int or float
        if type(tensor) is not FakeTensor or tensor in self._twins:
            with unset_fake_temporarily():
                twin = self._twins[tensor] if type(tensor) is FakeTensor else tensor
                return twin.item()
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _equal(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if left.shape != right.shape:
            return False
        if left in self._twins and right in self._twins:
            with unset_fake_temporarily():
                return torch.equal(self._twins[left], self._twins[right])
        return True

    def _on_fakes(
        self,
        func: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:  # noqa: ANN401
        if func is _aten._grouped_mm.default and tensors[0].dtype is torch.float32:
            return _grouped_product(*tensors)
        return self._cache.call(func, args, kwargs, tensors)

    def _real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        def twin(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, FakeTensor):
                return self._twins[value]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        real_args, real_kwargs = tree_map(twin, (args, kwargs))
        with unset_fake_temporarily():
            return func(*real_args, **real_kwargs)

    def _real_result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        real = self._real(func, args, kwargs)
        return tree_map(lambda t: self.fake(t) if isinstance(t, torch.Tensor) else t, real)

    def _follow(
        self,
        func: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,  # noqa: ANN401
    ) -> None:
        """Gives what an op on whole numbers returns its twins."""
        outputs = [t for t in tree_leaves(output) if isinstance(t, FakeTensor)]
        if not outputs or not all(_is_whole(t) for t in outputs):
            return
        if sum(t.numel() for t in outputs) > _MAX_ELEMENTS:
            return
        real = self._real(func, args, kwargs)
        for fake, twin in zip(outputs, _tensors(real), strict=True):
            self._twins[fake] = twin

    def _positions(self, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replaces masks among indices by the positions at which they are true."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            with unset_fake_temporarily():
                known = index in self._twins
                true = self._twins[index] if known else torch.ones(index.shape, dtype=torch.bool)
                positions = true.nonzero(as_tuple=True)
            found += [self.fake(position) for position in positions]
        return found

    def _spread(self, indices: torch.Tensor, *, num_choices: int) -> None:
        with unset_fake_temporarily():
            choices = torch.arange(indices.numel()) % num_choices
            self._twins[indices] = choices.reshape(indices.shape).to(indices.dtype)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The shape of `_grouped_mm` in float32: torch 2.13 has a kernel but no shape rule for it."""
    if left.dim() == 2 and right.dim() == 3:
        return left.new_empty((left.shape[0], right.shape[-1]))
    if left.dim() == 2:
        return left.new_empty((ends.shape[0], left.shape[0], right.shape[1]))
    return left.new_empty((left.shape[0], left.shape[1], right.shape[-1]))


def _given(args: Sequence[object], kwargs: dict[str, object]) -> Iterator[torch.Tensor]:
    """Yields the tensors an op is given: arguments, or in lists of them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _is_shaped_by_values(func: Any, name: str, args: tuple[Any, ...]) -> bool:  # noqa: ANN401
    return name in _SHAPED_BY_VALUES or (name == "aten::index" and _masks(args[1]))


def _masks(indices: list[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
