"""Loads torch's compiler where it does no harm."""

from __future__ import annotations

import torch


def load_compiler_now() -> None:
    """Loads the compiler that torch 2.13 loads at the first op under any dispatch mode.

    There it takes a second, and leaves reference cycles that hold the frames it was called from,
    tensors and all, until they are collected. So modes do it when they are made.
    """
    torch.compiler.disable(_nothing)  # type: ignore[no-untyped-call] # untyped in torch


def _nothing() -> None:
    """Does nothing."""
