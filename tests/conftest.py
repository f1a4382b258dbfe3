"""What every test begins with: one thread, and the environment that the run was started in."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# Another program on the same core can make any example slow.
settings.register_profile(
    "shared core", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared core")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The models are tiny, and sums must not depend on how work is split."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> None:
    """Where memory runs out garbage is collected, which takes as long as there are objects.

    Those of imported libraries are set aside, and what earlier tests have left.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Lightning leaves `LOCAL_RANK` and more; an Accelerator of a later test would be a rank."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """Benchmarks, whose slices the tests run, silence the logger for their whole process."""
    logger = logging.getLogger("rematic")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    """Strategies of one process leave their group behind, and there can be only one."""
    was_there = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_there:
        dist.destroy_process_group()
