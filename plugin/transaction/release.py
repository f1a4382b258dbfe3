"""Lets go of what an exception keeps alive: every local variable of the code that failed."""

from __future__ import annotations

import contextlib
import traceback

import torch


def release_attempt(error: BaseException, *losses: torch.Tensor | None) -> None:
    """Frees what a failed attempt holds through its exception and its losses.

    The traceback of an exception keeps the frames it passed through, and these the tensors of the
    step; so do the exceptions it was raised from or while handling. A loss that somebody still
    holds keeps the whole graph: it is detached in place. After a failed backward the engine itself
    keeps what it had still to do.

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
    _drop_what_backward_had_to_do()


def _drop_what_backward_had_to_do() -> None:
    """Lets the engine of torch 2.13 forget the nodes that were ready when a backward failed.

    They wait in a queue of this thread, with their gradients and all of the graph below them,
    until another backward finds that nobody wants them any more. This one allocates nothing, so it
    fails only where a rehearsal fails any op; then they wait as they would without it.
    """
    with contextlib.suppress(RuntimeError), torch.enable_grad():
        leaf = torch.empty(0, requires_grad=True, device="cpu")
        torch.autograd.grad(leaf.view_as(leaf), leaf, grad_outputs=leaf.detach())


def _chain(error: BaseException) -> list[BaseException]:
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in found:
            found[id(link)] = link
            waiting += [link.__cause__, link.__context__]
    return list(found.values())
