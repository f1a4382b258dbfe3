"""Reads documents out of tables: .parquet files, and datasets of the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rematic.recipes import DataConfig
from rematic.training.documents import Document, read_record
from rematic.training.extras import import_extra

_SAVED_MARKS = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files by which a folder that `save_to_disk` wrote is known."""


def read_parquet(file: Path, name: str, data: DataConfig) -> Iterator[Document]:
    """The documents of a .parquet file, one a row.

    Raises:
        ValueError: pyarrow is missing, the file cannot be read, or a row does not fit.
    """
    parquet = import_extra("pyarrow.parquet", extra="datasets", needed_by=str(file))
    try:
        opened = parquet.ParquetFile(file)
        known = set(opened.schema_arrow.names)
        columns = [column for column in _columns(data) if column in known]
        # with none of them, one row tells which columns there are
        table = opened.read(columns=columns or None)
    except Exception as error:  # pyarrow's errors are of several kinds
        raise ValueError(f"{file} cannot be read as Parquet ({error}); write it anew") from error
    rows = (row for batch in table.to_batches() for row in batch.to_pylist())
    yield from _documents(rows, data, name=name, where=str(file))


def read_dataset(
    source: str, data: DataConfig, *, key: str, max_documents: int | None = None
) -> Iterator[Document]:
    """The documents of a dataset by its name on the hub, its path, or a folder it was saved to.

    Args:
        source: Name or path.
        data: The data section of a recipe.
        key: Where the recipe names the source, for messages.
        max_documents: Read only so many; None: all.

    Raises:
        ValueError: `datasets` is missing, the dataset cannot be had, or a row does not fit.
    """
    library = import_extra("datasets", extra="datasets", needed_by="data.format: datasets")
    split = data.split or "train"
    try:
        rows = _load(library, source, data, split)
    except Exception as error:  # of hub, network, file system and the library alike
        text = " ".join(str(error).split())[:400]
        raise ValueError(
            f"{key} {source!r} cannot be loaded by datasets ({type(error).__name__}: {text})"
            f"; check name, data.subset and data.split ({split!r}), and this machine's network"
        ) from error
    if max_documents is not None:
        rows = rows.select(range(min(max_documents, len(rows))))
    yield from _documents(rows, data, name=source, where=f"{source}[{split}]")


def _load(library: Any, source: str, data: DataConfig, split: str) -> Any:  # noqa: ANN401 - untyped
    folder = Path(source).expanduser()
    if any((folder / mark).is_file() for mark in _SAVED_MARKS):
        saved = library.load_from_disk(str(folder))
        return saved[split] if isinstance(saved, library.DatasetDict) else saved
    return library.load_dataset(source, data.subset, split=split)


def _documents(
    rows: Iterable[Any], data: DataConfig, *, name: str, where: str
) -> Iterator[Document]:
    for number, row in enumerate(rows):
        yield read_record(row, data, name=f"{name}:{number:08d}", where=f"{where}, row {number}")


def _columns(data: DataConfig) -> list[str]:
    if data.messages_field is not None:
        return [data.messages_field]
    named = (data.text_field, data.target_field, data.label_field)
    return [column for column in named if column is not None]
