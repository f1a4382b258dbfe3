"""A sample of the gradients of one backward, small enough to keep beside another one."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from rematic.control import GradientDifference, gradient_difference

SAMPLED_ELEMENTS = 4096
"""Most elements of each parameter that are looked at, evenly spread."""


class GradientSample:
    """What a backward adds to the gradients, whatever they hold already.

    Parameters of up to 4,096 elements are looked at as a whole, of others every so-manieth element
    counts for those around it: 16 KiB a parameter, and nothing is added to any sum.

    Args:
        parameters: The leaves that are trained.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        trained = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._parts: list[torch.Tensor | None] = [None] * len(trained)
        self._shares = [p.numel() / max(len(_places(p)), 1) for p in trained]
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(functools.partial(self._take, number))  # type: ignore[no-untyped-call] # torch 2.13
            for number, parameter in enumerate(trained)
        ]

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            found = gradient.detach()
            if found.layout is not torch.strided:
                found = found.to_dense()
            places = torch.arange(*_bounds(found), device=found.device)
            part = found.take(places).float()
            before = self._parts[number]
            self._parts[number] = part if before is None else before + part

    def close(self) -> None:
        """Leaves the parameters as they were; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def difference_from(self, other: GradientSample) -> GradientDifference:
        """Compares it with a sample of the same parameters, which counts as right."""
        sums = torch.zeros(4, dtype=torch.float64)
        for mine, right, share in zip(self._parts, other._parts, self._shares, strict=True):
            if mine is None and right is None:
                continue
            one, two = _doubles(mine, like=right), _doubles(right, like=mine)
            apart = one - two
            sums += share * torch.stack(
                [one.dot(one), two.dot(two), one.dot(two), apart.dot(apart)]
            )
        squares, previous, products, apart_squares = sums.tolist()
        return gradient_difference(
            squares=squares,
            previous_squares=previous,
            products=products,
            squared_distance=apart_squares,
        )


def _doubles(part: torch.Tensor | None, *, like: torch.Tensor | None) -> torch.Tensor:
    """Returns a part on the CPU, zeros where there is none."""
    if part is not None:
        return part.cpu().double()
    assert like is not None
    return torch.zeros(like.shape, dtype=torch.float64)


def _places(parameter: torch.Tensor) -> range:
    return range(*_bounds(parameter))


def _bounds(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns start, end and step of the elements that are looked at.

    The step is odd, so that it does not fall on the same columns of a matrix again and again.
    """
    step = -(-tensor.numel() // SAMPLED_ELEMENTS)
    return 0, tensor.numel(), step | 1
