"""A disk stash that takes tensors of any size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rematic.stash import DiskStash


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStash]:
    stash = DiskStash(tmp_path, min_bytes=0, chunk_bytes=2**16)
    yield stash
    stash.close()
