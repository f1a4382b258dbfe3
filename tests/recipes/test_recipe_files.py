from __future__ import annotations

import os
from pathlib import Path

import pytest

from rematic.recipes.errors import RecipeError
from rematic.recipes.recipe_files import (
    MAX_FILE_BYTES,
    display,
    find_recipe,
    list_recipes,
    read_text,
)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _error(name: str | Path) -> str:
    with pytest.raises(RecipeError) as caught:
        find_recipe(name)
    return str(caught.value)


def test_the_list_of_recipes_is_sorted_and_holds_no_other_file() -> None:
    names = list_recipes()
    assert list(names) == sorted(names)
    assert {"tiny-cpu", "tiny-cpu-full"} <= set(names)


@pytest.mark.parametrize("name", list_recipes())
def test_a_shipped_recipe_is_found_by_its_name(name: str) -> None:
    path = find_recipe(name)
    assert path.stem == name
    assert path.is_file()


@pytest.mark.parametrize(
    "name", ["./mine.yaml", "mine.yml", "sub/mine", Path("mine.yml"), Path("sub/mine")], ids=str
)
def test_a_file_is_found_by_its_path(name: str | Path) -> None:
    Path("sub").mkdir()
    for file in ("mine.yaml", "mine.yml", "sub/mine"):
        Path(file).touch()
    assert find_recipe(name) == Path(name)
    assert find_recipe(name, folder=Path("sub/..")) == Path("sub/..") / name


def test_the_home_folder_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("mine.yaml").touch()
    assert find_recipe("~/mine.yaml", folder=Path("/")) == tmp_path / "mine.yaml"


@pytest.mark.parametrize("name", ["", ".", "tiny-cpu-", "nul\0"], ids=repr)
def test_an_unknown_name(name: str) -> None:
    assert _error(name).startswith(f"{name!r} is not the name of a recipe")


def test_the_name_of_a_shipped_recipe_with_a_suffix() -> None:
    assert _error("tiny-cpu.yaml").startswith(
        "'tiny-cpu.yaml' is no recipe: the file does not exist, did you mean tiny-cpu?; write the"
        " path"
    )


def test_a_file_that_cannot_be_read() -> None:
    Path("folder.yaml").mkdir()
    os.symlink("missing", "broken.yaml")
    os.mkfifo("pipe.yaml")
    assert _error("folder.yaml") == (
        "'folder.yaml' is no recipe: it is a folder; name a .yaml file in it"
    )
    for name in ("broken.yaml", "pipe.yaml"):
        assert _error(name) == (
            f"'{name}' is no recipe: it is not a regular file; copy the recipe to a .yaml file"
        )


def test_a_text_is_read_without_its_byte_order_mark() -> None:
    Path("a.yaml").write_bytes("\ufeffname: é\n".encode())
    assert read_text(Path("a.yaml")) == "name: é\n"


def test_the_largest_file_that_is_read() -> None:
    Path("a.yaml").write_bytes(b"#" * MAX_FILE_BYTES)
    assert len(read_text(Path("a.yaml"))) == MAX_FILE_BYTES


def test_a_file_that_the_system_does_not_hand_out() -> None:
    Path("folder").mkdir()
    with pytest.raises(RecipeError, match=r"^folder: cannot be read \(Is a directory\); check the"):
        read_text(Path("folder"))


def test_paths_are_shown_from_the_working_directory(tmp_path: Path) -> None:
    assert display(tmp_path / "sub" / "a.yaml") == os.path.join("sub", "a.yaml")
    assert display(tmp_path.parent / "a.yaml") == str(tmp_path.parent / "a.yaml")
