"""Imports bitsandbytes without its word on a kernel that no training uses."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

_TALKATIVE = "bitsandbytes.backends.cpu.ops"
"""Where version 0.50 warns, on CPUs with certain instructions and whatever device is meant, that a
kernel for evaluation of 4-bit layers could not be had from the hub."""


def import_quietly(module: str) -> ModuleType:
    """Imports a module that may import bitsandbytes.

    Args:
        module: The module.

    Raises:
        ImportError: It is not installed.
    """
    logger = logging.getLogger(_TALKATIVE)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(module)
    finally:
        logger.setLevel(level)
