"""An attempt that failed holds no memory when the next one begins (case F2)."""

from __future__ import annotations

import weakref

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
