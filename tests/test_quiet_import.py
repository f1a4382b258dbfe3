"""What a library says while it is imported, and what is none of our user's business."""

from __future__ import annotations

import importlib
import logging

import pytest

from rematic.quiet_import import import_quietly

KERNELS = logging.getLogger("bitsandbytes.backends.cpu.ops")


def test_no_word_is_said_of_a_kernel_that_no_training_uses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def talk(name: str) -> str:
        KERNELS.warning("Failed to load CPU gemm_4bit_forward from kernels-community")
        logging.getLogger("bitsandbytes").warning("this one matters")
        return name

    monkeypatch.setattr(importlib, "import_module", talk)
    assert str(import_quietly("bitsandbytes.nn")) == "bitsandbytes.nn"
    assert caplog.messages == ["this one matters"]
    KERNELS.warning("afterwards it may talk again")
    assert caplog.messages[1:] == ["afterwards it may talk again"]


def test_what_is_not_installed_is_said_as_ever() -> None:
    with pytest.raises(ImportError, match="not_there_at_all"):
        import_quietly("not_there_at_all")
