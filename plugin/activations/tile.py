"""Runs a token-wise module in slices along the sequence.

Planned first, then applied: `tile_calls` says what each slice is called with, `join_tiles` puts the
outputs together. Whoever calls in between decides what a slice is: a plain call, one under
`torch.utils.checkpoint`, a record of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rematic.activations.nested import Nested, iter_leaves, map_leaves

Call = tuple[tuple[Nested, ...], dict[str, Nested]]


def run_in_tiles(
    forward: Callable[..., Nested],
    args: tuple[Nested, ...],
    kwargs: Mapping[str, Nested],
    *,
    num_tiles: int,
    dim: int,
) -> Nested:
    """Returns `forward(*args, **kwargs)`, computed in slices of the tensors along `dim`.

    Values and gradients are those of the whole call as far as `forward` is token-wise, which
    `token_wise.is_token_wise` checks, and up to the order of sums: gradients of weights are added
    up over slices. The slices of an input may share its memory, so `forward` must not change its
    input in place; where they do, autograd refuses that.

    Args:
        forward: What to call for each slice.
        args: Positional arguments. Every tensor in them and in `kwargs`, however nested, is sliced,
            except those without dimensions.
        kwargs: Keyword arguments.
        num_tiles: Number of slices; fewer if the sequence is shorter.
        dim: The dimension of the sequence, counted from the end if negative.

    Raises:
        ValueError: If the tensors do not have one length along `dim`.
        RuntimeError: If an output has another length along `dim` than its slice.
    """
    outputs, lengths = [], []
    for tile_args, tile_kwargs in tile_calls(args, kwargs, num_tiles=num_tiles, dim=dim):
        lengths.append(sequence_length(tile_args, tile_kwargs, dim=dim))
        outputs.append(forward(*tile_args, **tile_kwargs))
    return join_tiles(outputs, lengths, dim=dim)


def tile_calls(
    args: tuple[Nested, ...],
    kwargs: Mapping[str, Nested],
    *,
    num_tiles: int,
    dim: int,
    copies: bool = True,
) -> Iterator[Call]:
    """Yields the arguments of each slice.

    They are views of the arguments of the whole call. Of a contiguous tensor whose slices are not
    contiguous (there is more than one sequence in the batch) a slice is copied when its turn comes,
    if there are `copies`: modules take views of their input and expect that they can.

    Raises:
        ValueError: If `num_tiles` is below 1, or the tensors do not have one length along `dim`.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles is {num_tiles}: expected 1 or more")
    length = sequence_length(args, kwargs, dim=dim)
    tile_length = max(1, -(-length // num_tiles))
    num_tiles = max(1, -(-length // tile_length))
    call: Call = (args, dict(kwargs))
    tensors = list(iter_leaves(call))
    # split, not narrow: its backward makes one gradient of all slices, not a padded one of each
    rows = [t.split(tile_length, dim) if t.ndim else (t,) * num_tiles for t in tensors]

    def leaves(i: int) -> Iterator[torch.Tensor]:
        for whole, pieces in zip(tensors, rows, strict=True):
            yield pieces[i].contiguous() if copies and whole.is_contiguous() else pieces[i]

    return (_with_leaves(call, leaves(i)) for i in range(num_tiles))


def join_tiles(outputs: Sequence[Nested], lengths: Sequence[int], *, dim: int) -> Nested:
    """Returns one output, whose tensors are those of the slices joined along `dim`.

    What is no tensor is taken from the first slice.

    Args:
        outputs: What each slice returned.
        lengths: Length of each slice.
        dim: The dimension of the sequence.

    Raises:
        RuntimeError: If the outputs differ in their structure, or the length of one is not that of
            its slice.
    """
    leaves = [list(iter_leaves(output)) for output in outputs]
    if len({len(tensors) for tensors in leaves}) != 1:
        raise RuntimeError(
            f"the slices returned {[len(tensors) for tensors in leaves]} tensors: expected as many "
            "from each. The module is not token-wise."
        )
    for tensors, length in zip(leaves, lengths, strict=True):
        for tensor in tensors:
            _check_output(tensor, length, dim)
    columns = zip(*leaves, strict=True)
    return _with_leaves(outputs[0], (torch.cat(column, dim) for column in columns))


def sequence_length(args: tuple[Nested, ...], kwargs: Mapping[str, Nested], *, dim: int) -> int:
    """Returns the length that every tensor of a call has along `dim`.

    Raises:
        ValueError: If there is no tensor, they differ, or one is not dense (sparse, jagged).
    """
    tensors = list(iter_leaves((args, dict(kwargs))))
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"a tensor argument has the layout {tensor.layout}: expected torch.strided. Only "
                "dense tensors can be sliced."
            )
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor.ndim]
    if not shapes:
        raise ValueError("the call has no tensor to slice: expected at least one with dimensions")
    for shape in shapes:
        if not -len(shape) <= dim < len(shape) or shape[dim] != shapes[0][dim]:
            raise ValueError(
                f"a tensor argument has the shape {shape}, the first one {shapes[0]}: expected the "
                f"same length along dimension {dim} in every tensor. A module that also takes "
                "tensors without the sequence cannot run in tiles."
            )
    return int(shapes[0][dim])


def _check_output(tensor: torch.Tensor, length: int, dim: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] != length:
        raise RuntimeError(
            f"a slice of {length} positions returned a tensor of shape {tuple(tensor.shape)}: "
            f"expected {length} along dimension {dim}. The module is not token-wise."
        )


def _with_leaves(value: Any, leaves: Iterator[torch.Tensor]) -> Any:
    # map_leaves meets the tensors in the order of iter_leaves
    return map_leaves(lambda _: next(leaves), value)
