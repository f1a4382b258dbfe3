"""Lets go of what an exception keeps alive: every local variable of the code that failed."""

from __future__ import annotations

import traceback

import torch


def release_attempt(error: BaseException, *losses: torch.Tensor | None) -> None:
    """Frees what a failed attempt holds through its exception and its losses.

    The traceback of an exception keeps the frames it passed through, and these the tensors of the
    step; so do the exceptions it was raised from or while handling. A loss that somebody still
    holds keeps the whole graph: it is detached in place.

    Args:
        error: The exception; it is left without a traceback.
        losses: Results of the attempt that callers may hold.
    """
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
    for loss in losses:
        if loss is not None and loss.grad_fn is not None and not loss._is_view():
            loss.detach_()


def _chain(error: BaseException) -> list[BaseException]:
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in found:
            found[id(link)] = link
            waiting += [link.__cause__, link.__context__]
    return list(found.values())
