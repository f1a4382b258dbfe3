"""Makes the folder of a run, and takes it away again when nothing came of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from rematic.journal import FILE_NAME

MAX_RUNS_OF_A_NAME = 10_000


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Where a run puts its files."""

    path: Path
    """The folder."""
    created: tuple[Path, ...] = field(default=())
    """Folders that were made for it, outermost first; empty for a run that is resumed."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def journal(self) -> Path:
        """The decision log."""
        return self.path / FILE_NAME

    @property
    def metrics(self) -> Path:
        """Loss and speed of each step, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        """Loss of each evaluation, one JSON object per line."""
        return self.path / "evaluation.jsonl"

    @property
    def recipe(self) -> Path:
        """The recipe as it was resolved."""
        return self.path / "recipe.yaml"

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.path / "last.ckpt"

    def discard(self) -> None:
        """Removes what was created; a run that is resumed keeps everything."""
        for folder in reversed(self.created):
            if folder == self.path:
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def create_run_directory(folder: str | Path, *, name: str) -> RunDirectory:
    """Makes a new folder for a run: `name`, or `name-2`, `name-3`, ... where that exists.

    Args:
        folder: Holds the runs; made when it does not exist.
        name: Name of the run.

    Raises:
        ValueError: The folder cannot be made or written; nothing is left behind.
    """
    parent = Path(folder)
    made: list[Path] = []
    try:
        made = [p for p in (parent, *parent.parents) if not p.exists()][::-1]
        parent.mkdir(parents=True, exist_ok=True)
        path = _make_unique(parent, name)
    except OSError as error:
        RunDirectory(path=parent / name, created=tuple(made)).discard()
        raise ValueError(
            f"run.dir {str(folder)!r} cannot be written ({error.strerror}: {error.filename}); "
            "expected a folder where this user may create files: set run.dir=... to another"
        ) from None
    return RunDirectory(path=path, created=(*made, path))


def open_run_directory(path: str | Path) -> RunDirectory:
    """The folder of an earlier run, to go on with it.

    Raises:
        ValueError: It is not a run, or has no checkpoint.
    """
    directory = RunDirectory(path=Path(path))
    for file, what in (
        (directory.recipe, "a resolved recipe"),
        (directory.journal, "a journal"),
        (directory.checkpoint, "a checkpoint"),
    ):
        if not file.is_file():
            raise ValueError(
                f"{path} cannot be resumed: it holds no {file.name}; expected the folder of a run "
                f"with {what}, as rematic train leaves it: name another, or train anew"
            )
    return directory


def _make_unique(parent: Path, name: str) -> Path:
    for number in range(1, MAX_RUNS_OF_A_NAME):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise ValueError(
        f"run.dir {str(parent)!r} holds {MAX_RUNS_OF_A_NAME} runs named {name!r}; "
        "expected room for one more: set run.name or run.dir to another"
    )
