"""Turns documents into sequences of token ids with their labels."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rematic.recipes import DataConfig
from rematic.training.chat import ChatTemplate, find_template
from rematic.training.documents import Document
from rematic.training.tokens import Tokenizer

NO_LOSS = -100
"""Label of a token that has no loss."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One sequence."""

    ids: tuple[int, ...]
    """Token ids."""
    labels: tuple[int, ...]
    """A label for each token (`NO_LOSS` for none); the target of seq2seq; empty for a class."""
    label: int | None = None
    """The class of the sequence."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What became of the documents of a corpus."""

    examples: tuple[Example, ...]
    """At least one, in the order of the documents."""
    names: tuple[str, ...]
    """The document of each."""
    num_cut: int
    """Documents that lost their end."""
    num_skipped: int
    """Documents that were left out because they are too long or nothing with a loss was left."""
    num_spread: int = 0
    """Conversations with answers that are trained in several sequences."""

    @property
    def sha256(self) -> str:
        """Hash over all sequences, whatever made them: documents, template, tokenizer."""
        digest = hashlib.sha256()
        for one in self.examples:
            digest.update(repr((len(one.ids), len(one.labels), one.label)).encode())
            digest.update(array("q", one.ids).tobytes() + array("q", one.labels).tobytes())
        return digest.hexdigest()


def encode_documents(
    documents: Sequence[Document], data: DataConfig, tokenizer: Tokenizer, *, is_seq2seq: bool
) -> Encoded:
    """The sequences of documents, none longer than `data.max_length`.

    Raises:
        ValueError: A document is too long and the recipe says to refuse it, a template does not
            fit, or nothing is left.
    """
    template = None
    if data.messages_field is not None:
        template = find_template(tokenizer, data.chat_template)
    examples: list[Example] = []
    names: list[str] = []
    num_cut = num_skipped = num_spread = 0
    for document in documents:
        wholes = _encode(document, data, tokenizer, template, is_seq2seq=is_seq2seq)
        fitted = [
            (whole, list(_fit(whole, data, name=document.name, is_seq2seq=is_seq2seq)))
            for whole in wholes
        ]
        with_loss = [
            part for _, parts in fitted for part in parts if _has_loss(part, is_seq2seq=is_seq2seq)
        ]
        num_skipped += not with_loss
        num_cut += any(_is_cut(whole, parts) for whole, parts in fitted)
        num_spread += len(wholes) > 1
        examples += with_loss
        names += [document.name] * len(with_loss)
    if not examples:
        raise ValueError(
            f"none of {len(documents)} documents is left: each is longer than data.max_length "
            f"({data.max_length}) or has nothing to learn within it; raise data.max_length, or set "
            "data.overlong=cut"
        )
    return Encoded(
        examples=tuple(examples),
        names=tuple(names),
        num_cut=num_cut,
        num_skipped=num_skipped,
        num_spread=num_spread,
    )


def _is_cut(whole: Example, parts: Sequence[Example]) -> bool:
    """Whether a sequence has lost the end of its text or of its answer."""
    return len(parts) == 1 and (
        len(parts[0]) < len(whole) or len(parts[0].labels) < len(whole.labels)
    )


def _encode(
    document: Document,
    data: DataConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    is_seq2seq: bool,
) -> list[Example]:
    if template is not None:
        return _encode_conversation(document, data, tokenizer, template)
    text = document.text.decode()
    if document.label is not None:
        return [Example(ids=tuple(tokenizer.encode(text)), labels=(), label=document.label)]
    if document.target is None:
        ids = tuple(tokenizer.encode(text))
        return [Example(ids=ids, labels=ids)]
    answer = document.target.decode()
    if is_seq2seq:
        return [Example(ids=tuple(tokenizer.encode(text)), labels=tuple(tokenizer.encode(answer)))]
    before, after = tokenizer.encode_pair(text, answer)
    told = [NO_LOSS] * len(before) if data.answers_only else before
    return [Example(ids=(*before, *after), labels=(*told, *after))]


def _encode_conversation(
    document: Document, data: DataConfig, tokenizer: Tokenizer, template: ChatTemplate
) -> list[Example]:
    if not data.answers_only:
        text = template.text(document.messages, where=document.name)
        ids, _ = tokenizer.encode_spans(text, [])
        return [Example(ids=tuple(ids), labels=tuple(ids))]
    examples = []
    for text, spans in template.render(document.messages, where=document.name):
        ids, inside = tokenizer.encode_spans(text, spans)
        labels = [one if answers else NO_LOSS for one, answers in zip(ids, inside, strict=True)]
        examples.append(Example(ids=tuple(ids), labels=tuple(labels)))
    return examples


def _fit(example: Example, data: DataConfig, *, name: str, is_seq2seq: bool) -> Iterator[Example]:
    """The parts of a sequence that are trained."""
    longest = data.max_length
    if is_seq2seq and len(example.labels) > longest and data.overlong == "cut":
        example = dataclasses.replace(example, labels=example.labels[:longest])
    if max(len(example), len(example.labels)) <= longest:
        yield example
        return
    if data.overlong == "refuse":
        raise ValueError(
            f"document {name} has {max(len(example), len(example.labels))} tokens, more than "
            f"data.max_length ({longest}); raise it, shorten the document, or set data.overlong to "
            "cut, split or skip"
        )
    if data.overlong == "split" and (is_seq2seq or example.label is not None):
        raise ValueError(
            f"document {name} has {len(example)} tokens and cannot be split, since its answer or "
            "class belongs to the whole; set data.overlong to cut or skip"
        )
    if data.overlong == "skip":
        return
    stops = range(0, len(example), longest) if data.overlong == "split" else range(1)
    per_token = not is_seq2seq and example.label is None
    for start in stops:
        span = slice(start, start + longest)
        labels = example.labels[span] if per_token else example.labels
        yield Example(ids=example.ids[span], labels=labels, label=example.label)


def _has_loss(example: Example, *, is_seq2seq: bool) -> bool:
    if example.label is not None or is_seq2seq:
        return True
    # the first token is predicted by nothing
    return any(label != NO_LOSS for label in example.labels[1:])
