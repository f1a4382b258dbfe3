from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rematic.recipes import DataConfig
from rematic.training.corpus import load_corpus

ROWS: dict[str, Any] = {"text": ["one", "two", "three"], "class": [0, 1, 1]}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(ROWS), path)
    return path


def texts(data: DataConfig) -> list[bytes]:
    return [document.text for document in load_corpus(data).documents]


def test_a_row_of_parquet_is_a_document(parquet: Path) -> None:
    assert texts(DataConfig(source=str(parquet))) == [b"one", b"two", b"three"]
    corpus = load_corpus(DataConfig(source=str(parquet.parent), label_field="class"))
    assert [document.label for document in corpus.documents] == [0, 1, 1]


def test_a_dataset_is_loaded_by_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        return datasets.Dataset.from_dict(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = DataConfig(source="a/b", format="datasets", subset="en", split="test")
    assert texts(data) == [b"one", b"two", b"three"]
    assert texts(DataConfig(source="a/b", format="datasets", max_documents=1)) == [b"one"]
    assert asked == [("a/b", "en", "test"), ("a/b", None, "train")]


@pytest.mark.parametrize("has_splits", [False, True])
def test_a_dataset_that_was_saved_to_disk(tmp_path: Path, has_splits: bool) -> None:
    rows = datasets.Dataset.from_dict(ROWS)
    saved = datasets.DatasetDict({"train": rows}) if has_splits else rows
    saved.save_to_disk(tmp_path / "saved")
    found = texts(DataConfig(source=str(tmp_path / "saved"), format="datasets"))
    assert found == [b"one", b"two", b"three"]


def test_the_column_that_is_missing_is_named(parquet: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("rows.parquet, row 0 has no field 'body'; its")):
        texts(DataConfig(source=str(parquet), text_field="body"))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as Parquet"):
        texts(DataConfig(source=str(tmp_path / "a.parquet")))


def test_a_dataset_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"'a/b' cannot be loaded by datasets \(ConnectionError"):
        texts(DataConfig(source="a/b", format="datasets"))


def test_the_extra_that_is_missing_is_named(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs pyarrow.*pip install 'rematic\[datasets\]'"):
        texts(DataConfig(source=str(parquet)))
    with pytest.raises(ValueError, match=r"needs datasets.*pip install 'rematic\[datasets\]'"):
        texts(DataConfig(source="a/b", format="datasets"))
