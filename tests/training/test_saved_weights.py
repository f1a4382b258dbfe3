"""Weights are saved whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from rematic.training.saved_weights import save_weights
from tests.training.small import prepare


class FullDisk:
    """A tokenizer for which there is no room."""

    def save_pretrained(self, folder: Path) -> None:
        assert list(Path(folder).glob("*.safetensors")), "the weights went first"
        (Path(folder) / "tokenizer.json").write_text("half of it")
        raise OSError("no space left on device")


@pytest.mark.parametrize("save", ["adapter", "merged"])
def test_an_interrupted_save_leaves_what_was_there(save: str, tmp_path: Path) -> None:
    recipe, _, model = prepare("tuning.method=lora", f"run.save={save}")
    with pytest.raises(OSError, match="no space left"):
        save_weights(recipe, model, tmp_path, tokenizer=FullDisk())
    assert list(tmp_path.iterdir()) == []
    recipe, _, model = prepare("tuning.method=lora", f"run.save={save}")
    (folder,) = save_weights(recipe, model, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert list(tmp_path.iterdir()) == [folder]
    recipe, _, model = prepare("tuning.method=lora", f"run.save={save}", "training.seed=1")
    with pytest.raises(OSError, match="no space left"):
        save_weights(recipe, model, tmp_path, tokenizer=FullDisk())
    assert list(tmp_path.iterdir()) == [folder]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_weights(recipe, model, tmp_path)  # as a resumed run does
    assert list(tmp_path.iterdir()) == [folder]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} != before
