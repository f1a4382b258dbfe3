"""One thread and the usual answer to Ctrl-C for every test, and what runs fits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hosts.lightning_fits import Runner


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it after one KeyboardInterrupt
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    return Runner(registry=monkeypatch, folder=tmp_path)
