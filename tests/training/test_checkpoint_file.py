from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rematic.training.checkpoint_file import CheckpointFile


def test_writes_what_lightning_reads(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    CheckpointFile().save_checkpoint({"weights": torch.ones(3), "step": 2}, path)
    loaded = CheckpointFile().load_checkpoint(path, weights_only=True)
    assert loaded["step"] == 2
    assert torch.equal(loaded["weights"], torch.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    CheckpointFile().save_checkpoint({"step": 1}, path)

    def break_off(checkpoint: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", break_off)
    with pytest.raises(OSError, match="No space left"):
        CheckpointFile().save_checkpoint({"step": 2}, path)
    assert CheckpointFile().load_checkpoint(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_refuses_storage_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected None, a local file"):
        CheckpointFile().save_checkpoint({}, tmp_path / "x", storage_options={"a": 1})
