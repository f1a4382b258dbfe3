"""One thread, and a disk stash that takes tensors of any size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rematic.stash import DiskStash


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStash]:
    stash = DiskStash(tmp_path, min_bytes=0, chunk_bytes=2**16)
    yield stash
    stash.close()
