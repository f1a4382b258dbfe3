from __future__ import annotations

from pathlib import Path

import pytest

from rematic.whole_files import replaced_when_whole, write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for content in (b"old", b"new"):
        write_whole(path, content)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_take_its_place_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"state\.json"):
        write_whole(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_takes_its_place_only_when_whole(tmp_path: Path, fails: bool) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "old").touch()

    def write() -> None:
        with replaced_when_whole(folder) as unfinished:
            (unfinished / folder.name).mkdir(parents=True)
            (unfinished / folder.name / "new").touch()
            if fails:
                raise OSError("No space left on device")

    if fails:
        with pytest.raises(OSError, match="No space left"):
            write()
    else:
        write()
    assert [path.name for path in folder.iterdir()] == ["old" if fails else "new"]
    assert list(tmp_path.iterdir()) == [folder]
