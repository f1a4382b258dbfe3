from __future__ import annotations

import re
from pathlib import Path

import pytest

from rematic.training.run_directory import create_run_directory, open_run_directory


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    names = [create_run_directory(tmp_path / "runs", name="tiny").name for _ in range(3)]
    assert names == ["tiny", "tiny-2", "tiny-3"]


def test_discarding_takes_away_what_was_made_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    first = create_run_directory(tmp_path / "mine" / "a" / "runs", name="tiny")
    (first.path / "journal.jsonl").write_text("x")
    first.discard()
    assert list((tmp_path / "mine").iterdir()) == []

    kept = create_run_directory(tmp_path / "runs", name="tiny")
    other = create_run_directory(tmp_path / "runs", name="tiny")
    other.discard()
    kept_again = create_run_directory(tmp_path / "runs", name="tiny")
    assert (kept.path.is_dir(), kept_again.name) == (True, "tiny-2")


def test_a_folder_with_another_run_in_it_stays(tmp_path: Path) -> None:
    first = create_run_directory(tmp_path / "runs", name="tiny")
    create_run_directory(tmp_path / "runs", name="tiny")
    first.discard()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-2"]


def test_refuses_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "runs"
    with pytest.raises(ValueError, match=re.escape(f"run.dir {str(folder)!r} cannot be written")):
        create_run_directory(folder, name="tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_leaves_no_parent_behind_when_the_last_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        if path.name == "tiny":
            raise PermissionError(13, "Permission denied", str(path))
        make(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"Permission denied: .*tiny\); expected a folder where"):
        create_run_directory(tmp_path / "a" / "runs", name="tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["recipe.yaml", "journal.jsonl", "last.ckpt"])
def test_opens_only_what_can_be_resumed(tmp_path: Path, missing: str) -> None:
    for name in {"recipe.yaml", "journal.jsonl", "last.ckpt"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"cannot be resumed: it holds no {re.escape(missing)}"):
        open_run_directory(tmp_path)
    (tmp_path / missing).touch()
    directory = open_run_directory(tmp_path)
    directory.discard()
    assert directory.checkpoint.exists()
