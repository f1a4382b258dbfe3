"""An attempt that failed holds no memory when the next one begins (case F2)."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from rematic.transaction import release_attempt


def test_locals_of_the_failing_frames_die_while_the_exception_lives() -> None:
    refs = []

    def fails() -> None:
        tensor = torch.ones(4, requires_grad=True) * 2
        refs.append(weakref.ref(tensor))
        try:
            raise ValueError("first")
        except ValueError as error:
            raise torch.OutOfMemoryError("injected") from error

    kept = None
    try:
        fails()
    except torch.OutOfMemoryError as error:
        assert refs[0]() is not None
        kept = error
        release_attempt(error)
    assert refs[0]() is None
    assert kept.__traceback__ is None
    assert kept.__cause__ is not None
    assert kept.__cause__.__traceback__ is None


def test_a_loss_that_someone_holds_lets_its_graph_go() -> None:
    saved = torch.ones(4)
    ref = weakref.ref(saved)
    loss = (torch.ones(4, requires_grad=True) * saved).sum()
    del saved
    assert ref() is not None
    release_attempt(torch.OutOfMemoryError("injected"), loss, None)
    assert ref() is None
    assert not loss.requires_grad


class RunsOut(torch.autograd.Function):
    """Has no memory in backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("injected")


def test_what_a_failed_backward_had_still_to_do_lets_its_tensors_go() -> None:
    saved = [torch.ones(4) for _ in range(5)]
    refs = [weakref.ref(tensor) for tensor in saved]
    leaf = torch.ones(4, requires_grad=True)
    loss = sum((leaf * tensor).sum() for tensor in saved) + RunsOut.apply(leaf).sum()
    saved.clear()
    try:
        loss.backward()
    except torch.OutOfMemoryError as error:
        kept = error
    assert sum(ref() is not None for ref in refs) == 5
    release_attempt(kept, loss)
    assert sum(ref() is not None for ref in refs) == 0
    assert leaf.grad is None
