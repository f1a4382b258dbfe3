"""Reads the documents to train on: those of the standard library, files, or a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from rematic.recipes import DataConfig
from rematic.training.documents import Corpus, Document, checked_text, read_record
from rematic.training.tables import read_dataset, read_parquet

DATA_KEY = "data.source"
"""Key of the documents that are trained on."""

EMBEDDED_SOURCE = "pydoc_topics"
"""Name of the embedded corpus: the 79 topics of `pydoc_data.topics` in the standard library."""

SUFFIXES = (".txt", ".jsonl", ".parquet")
"""Files that are read; others in a folder are left alone."""


def load_corpus(
    data: DataConfig, *, source: str | None = None, max_documents: int | None = None
) -> Corpus:
    """Reads a corpus.

    Args:
        data: The data section of a recipe. A .txt file is one document; each line of a .jsonl file
            and each row of a .parquet file or a dataset is one.
        source: Where the documents are instead of `data.source`.
        max_documents: Keep only so many documents, the first by name; None: `data.max_documents`,
            where the source is that of the data.

    Raises:
        ValueError: Something is missing, empty, or not text. The message says where.
    """
    key = DATA_KEY if source is None else "evaluation.source"
    if source is None:
        source, max_documents = data.source, max_documents or data.max_documents
    if data.format == "datasets":
        documents = list(read_dataset(source, data, key=key, max_documents=max_documents))
    elif source == EMBEDDED_SOURCE:
        documents = _embedded(data, key=key)
    else:
        documents = _from_path(source, data, key=key)
    chosen = sorted(documents, key=lambda document: document.name)[:max_documents]
    if not chosen:
        raise ValueError(
            f"{source} holds no document; expected at least one: fill it, or name another {key}"
        )
    return Corpus(source=source, documents=tuple(chosen))


def document_order(num_documents: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of the documents in one epoch.

    It is the same on every platform and Python version, so that a resumed run goes on where it
    stopped: documents are sorted by the hash of seed, epoch and position.
    """
    if not shuffle:
        return list(range(num_documents))
    return sorted(
        range(num_documents),
        key=lambda index: hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest(),
    )


def _embedded(data: DataConfig, *, key: str) -> list[Document]:
    from pydoc_data.topics import topics

    for field in ("target_field", "messages_field", "label_field"):
        if getattr(data, field) is not None:
            raise ValueError(
                f"data.{field} is {getattr(data, field)!r}, but {EMBEDDED_SOURCE} is plain text; "
                "name your own .jsonl or .parquet file by data.source"
            )
    if key == DATA_KEY:
        _refuse_text_field(data, EMBEDDED_SOURCE)
    return [Document(name=name, text=text.encode()) for name, text in topics.items()]


def _from_path(source: str, data: DataConfig, *, key: str) -> list[Document]:
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"{key} {source!r} does not exist; expected {EMBEDDED_SOURCE!r}, or a path to a "
            f".txt, .jsonl or .parquet file or to a folder of those (looked in {Path.cwd()}); a "
            "dataset of the hub needs data.format=datasets"
        )
    root = path if path.is_dir() else path.parent
    files = _files(path)
    if key == DATA_KEY and all(file.suffix == ".txt" for file in files):
        _refuse_text_field(data, source)
    return [
        document
        for file in files
        for document in _read(file, file.relative_to(root).as_posix(), data)
    ]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        if not files:
            raise ValueError(
                f"folder {path} holds no .txt, .jsonl or .parquet file; "
                "put the documents there under one of those endings, or name another folder"
            )
        return files
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path} ends in {path.suffix or 'nothing'!r}; expected a .txt file (one document), a "
            ".jsonl file (one document per line) or a .parquet file (one per row): rename or "
            "convert it"
        )
    return [path]


def _read(file: Path, name: str, data: DataConfig) -> Iterator[Document]:
    if file.suffix == ".parquet":
        yield from read_parquet(file, name, data)
        return
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}); give this user the right to read it"
        ) from None
    if file.suffix == ".jsonl":
        yield from _read_lines(content, file, name, data)
    else:
        _refuse_fields_of_text(file, data)
        yield Document(name=name, text=checked_text(content, where=str(file)))


def _read_lines(content: bytes, file: Path, name: str, data: DataConfig) -> Iterator[Document]:
    """The documents of a .jsonl file; line numbers are padded, so that they sort as numbers."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where} is not JSON ({error}); expected an object per line, "
                f'as {{"{data.text_field}": "..."}}'
            ) from None
        yield read_record(record, data, name=f"{name}:{number:08d}", where=where)


def _refuse_text_field(data: DataConfig, source: str) -> None:
    if data.text_field != DataConfig.text_field:
        raise ValueError(
            f"data.text_field is {data.text_field!r}, but {source} is plain text without fields, "
            f"where it has no effect; remove it, or name a .jsonl or .parquet file by {DATA_KEY}"
        )


def _refuse_fields_of_text(file: Path, data: DataConfig) -> None:
    for key in ("target_field", "messages_field", "label_field"):
        if getattr(data, key) is not None:
            raise ValueError(
                f"{file} is plain text and has no field {getattr(data, key)!r} as data.{key} says; "
                "expected a .jsonl or .parquet file"
            )
