"""Keeps libraries quiet, and their caches off, while a recipe trains."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps the notices of Lightning and transformers about themselves off the screen."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(), _no_bars():
            # Lightning 2.6 asks torch 2.13 in a way that is deprecated.
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Lets the config say that nothing is cached, for whoever calls the model while it trains.

    What is saved afterwards says again what it said before.
    """
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before is not None:
        config.use_cache = False
    try:
        yield
    finally:
        if before is not None:
            config.use_cache = before


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keeps the bars of transformers off the screen, which cannot start under a memory cap."""
    from transformers.utils import logging as module

    transformers_logging: Any = module  # untyped
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
