"""Reads the documents to train on: those of the standard library, or files of the user's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

EMBEDDED_SOURCE = "pydoc_topics"
"""Name of the embedded corpus: the 79 topics of `pydoc_data.topics` in the standard library."""

SUFFIXES = (".txt", ".jsonl")
"""Files that are read; others in a folder are left alone."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, trained as one sequence."""

    name: str
    """A topic, a path inside the source, or such a path and a line number."""
    text: bytes
    """The text in UTF-8, never empty."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of a run, sorted by name."""

    source: str
    """The embedded corpus by name, or a path."""
    documents: tuple[Document, ...]
    """At least one."""

    @property
    def sha256(self) -> str:
        """Hash over names and texts: two runs with the same hash trained on the same data."""
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.name.encode(), document.text):
                digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()


def load_corpus(
    source: str, *, text_field: str = "text", max_documents: int | None = None
) -> Corpus:
    """Reads a corpus.

    Args:
        source: `pydoc_topics`, or a path to a .txt or .jsonl file or to a folder of those. A .txt
            file is one document; each line of a .jsonl file is one.
        text_field: Field of a .jsonl line that holds the text.
        max_documents: Keep only so many documents, the first by name.

    Raises:
        ValueError: Something is missing, empty, or not text. The message says where.
    """
    documents = _embedded() if source == EMBEDDED_SOURCE else _from_path(source, text_field)
    chosen = sorted(documents, key=lambda document: document.name)[:max_documents]
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


def _embedded() -> list[Document]:
    from pydoc_data.topics import topics

    return [Document(name=name, text=text.encode()) for name, text in topics.items()]


def _from_path(source: str, text_field: str) -> list[Document]:
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"data.source {source!r} does not exist; expected {EMBEDDED_SOURCE!r}, or a path to a "
            f".txt or .jsonl file or to a folder of those (looked in {Path.cwd()})"
        )
    root = path if path.is_dir() else path.parent
    documents = [
        Document(name=name, text=text)
        for file in _files(path)
        for name, text in _read(file, file.relative_to(root).as_posix(), text_field)
    ]
    if not documents:
        raise ValueError(f"{source} holds no document; expected at least one line of JSON")
    return documents


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        if not files:
            raise ValueError(
                f"folder {path} holds no .txt or .jsonl file; "
                "put the documents there under one of those endings, or name another folder"
            )
        return files
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path} ends in {path.suffix or 'nothing'!r}; expected a .txt file (one document) or "
            "a .jsonl file (one document per line): rename or convert it"
        )
    return [path]


def _read(file: Path, name: str, text_field: str) -> Iterator[tuple[str, bytes]]:
    """Names and texts of one file; line numbers are padded, so that they sort as numbers."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}); give this user the right to read it"
        ) from None
    if file.suffix == ".txt":
        yield name, _checked_text(content, where=str(file))
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"{name}:{number:08d}", _text_of_line(line, f"{file}:{number}", text_field)


def _text_of_line(line: bytes, where: str, text_field: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{where} is not JSON ({error}); expected an object per line, "
            f'as {{"{text_field}": "..."}}'
        ) from None
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{where} is a JSON {type(record).__name__}; expected an object with the text under "
            f"{text_field!r}"
        )
    if text_field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise ValueError(
            f"{where} has no field {text_field!r}; its fields are {fields}: "
            "set data.text_field to the one that holds the text"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: field {text_field!r} is a {type(text).__name__}; expected a string"
        )
    return _checked_text(_as_utf8(text, where), where=where)


def _as_utf8(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: the text holds half a surrogate pair at character {error.start}; "
            "expected text that UTF-8 can hold: write the whole pair, or remove it"
        ) from None


def _checked_text(content: bytes, *, where: str) -> bytes:
    """The bytes of a document without its byte order mark.

    Raises:
        ValueError: They are empty or not text.
    """
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise ValueError(
            f"{where} is an empty document ({len(content)} bytes of white space); "
            "expected text: remove it or fill it"
        )
    if (position := content.find(b"\0")) >= 0:
        raise ValueError(
            f"{where} is binary (a NUL byte at position {position}); "
            "expected text in UTF-8: remove it, or convert it"
        )
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 (byte {content[error.start]:#04x} at position {error.start}); "
            "expected text in UTF-8: convert it, for example with iconv"
        ) from None
    return content
