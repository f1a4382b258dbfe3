"""Documents: what a row or a file of the data says, checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rematic.recipes import DataConfig

MOST_CLASSES = 65_536
"""So many classes a head may have; a larger number of a class is an identifier of something."""

ROLES = ("system", "user", "assistant", "tool")
"""Who can say something in a conversation."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """Who says it."""
    content: str
    """What; empty only where tools are called."""
    more: str = ""
    """What else the row says of it, such as `reasoning_content` or `tool_calls`, as JSON."""

    def to_plain(self) -> dict[str, Any]:
        """What a template is given."""
        more: dict[str, Any] = json.loads(self.more) if self.more else {}
        return {"role": self.role, "content": self.content, **more}


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, trained as one sequence."""

    name: str
    """A topic, a path inside the source, or such a path and a number of the line or row."""
    text: bytes = b""
    """The text in UTF-8; empty only where there are messages."""
    target: bytes | None = None
    """What the text is to be answered by."""
    messages: tuple[Message, ...] = ()
    """The conversation instead of a text."""
    label: int | None = None
    """The class of the text."""

    def parts(self) -> list[bytes]:
        """Everything that makes it another document."""
        said = [
            part.encode()
            for one in self.messages
            for part in (one.role, one.content, *([one.more] if one.more else []))
        ]
        label = [] if self.label is None else [str(self.label).encode()]
        target = [] if self.target is None else [self.target]
        return [self.name.encode(), self.text, *target, *said, *label]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of a run, sorted by name."""

    source: str
    """The embedded corpus by name, a path, or the name of a dataset."""
    documents: tuple[Document, ...]
    """At least one."""

    @property
    def sha256(self) -> str:
        """Hash over names and texts: two runs with the same hash trained on the same data."""
        digest = hashlib.sha256()
        for document in self.documents:
            for part in document.parts():
                digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()


def read_record(record: object, data: DataConfig, *, name: str, where: str) -> Document:
    """The document in a line of .jsonl or in a row of a table.

    Args:
        record: The line or row.
        data: Says which fields hold what.
        name: Of the document.
        where: The line or row, for messages.

    Raises:
        ValueError: A field is missing, empty, or of another type.
    """
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{where} is a JSON {type(record).__name__}; expected an object with the text under "
            f"{data.text_field!r}"
        )
    if data.messages_field is not None:
        messages = _messages(_field(record, "messages_field", data.messages_field, where), where)
        return Document(name=name, messages=messages)
    target = label = None
    if data.target_field is not None:
        target = _text(record, "target_field", data.target_field, where)
    if data.label_field is not None:
        label = _label(_field(record, "label_field", data.label_field, where), data.labels, where)
    text = _text(record, "text_field", data.text_field, where)
    return Document(name=name, text=text, target=target, label=label)


def checked_text(content: bytes, *, where: str) -> bytes:
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


def _field(record: Mapping[str, object], key: str, field: str, where: str) -> object:
    if field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise ValueError(
            f"{where} has no field {field!r}; its fields are {fields}: "
            f"set data.{key} to the one that holds it"
        )
    return record[field]


def _text(record: Mapping[str, object], key: str, field: str, where: str) -> bytes:
    text = _field(record, key, field, where)
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}; expected a string")
    if key == "target_field" and not text.strip():
        raise ValueError(
            f"{where}: the answer under {field!r} is empty, and an empty answer has no loss; "
            "remove the line, or fill it"
        )
    return checked_text(_as_utf8(text, where), where=where)


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(
            f"{where}: the conversation is {json.dumps(value, default=str)[:60]}; expected a list "
            'such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    messages = tuple(_message(one, f"{where}, message {at}") for at, one in enumerate(value))
    if not any(one.role == "assistant" for one in messages):
        raise ValueError(
            f"{where}: nobody answers; expected at least one message of the role assistant"
        )
    return messages


def _message(value: object, where: str) -> Message:
    said = value if isinstance(value, Mapping) else {}
    more = {key: said[key] for key in said if key not in ("role", "content")}
    more = {key: item for key, item in more.items() if item is not None}  # columns of tables
    role, content = said.get("role"), said.get("content")
    if content is None and more.get("tool_calls"):
        content = ""
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(
            f"{where} is {json.dumps(value, default=str)[:60]}; expected a role, one of "
            f"{', '.join(ROLES)}, and a content that is text"
        )
    if role == "assistant" and not content.strip() and not more.get("tool_calls"):
        raise ValueError(f"{where}: the answer is empty and has no loss; remove it, or fill it")
    text = json.dumps(more, ensure_ascii=False, sort_keys=True, default=str) if more else ""
    _as_utf8(content + text, where)
    return Message(role=str(role), content=content, more=text)


def _label(value: object, labels: Sequence[str], where: str) -> int:
    if labels:
        if value not in labels:
            raise ValueError(
                f"{where}: the class is {value!r}; expected one of data.labels: {', '.join(labels)}"
            )
        return labels.index(str(value))
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_CLASSES:
        raise ValueError(
            f"{where}: the class is {value!r:.40}; expected a whole number from 0 to "
            f"{MOST_CLASSES - 1} as numbers of classes are, or a name of data.labels"
        )
    return value


def _as_utf8(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: the text holds half a surrogate pair at character {error.start}; "
            "expected text that UTF-8 can hold: write the whole pair, or remove it"
        ) from None
