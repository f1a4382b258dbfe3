"""Rows of data become sequences with the right labels; what cannot is refused by its place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rematic.recipes import DataConfig
from rematic.training.byte_tokens import decode
from rematic.training.corpus import load_corpus
from rematic.training.data import TrainingData, load_data
from rematic.training.examples import NO_LOSS, Encoded, Example, encode_documents
from rematic.training.tokens import ByteTokenizer
from tests.training.small import prepare, tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hé"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "nö"},
]


def encoded(
    folder: Path, rows: list[Mapping[str, Any]], *, is_seq2seq: bool = False, **keys: Any
) -> Encoded:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(folder / "rows.jsonl"), **keys)
    documents = load_corpus(data).documents
    return encode_documents(documents, data, ByteTokenizer(), is_seq2seq=is_seq2seq)


def with_loss(example: Example) -> bytes:
    return decode([label for label in example.labels if label != NO_LOSS])


def test_text_alone_is_its_own_label(tmp_path: Path) -> None:
    (example,) = encoded(tmp_path, [{"text": "ab"}]).examples
    assert example == Example(ids=(1, 100, 101, 2), labels=(1, 100, 101, 2))


@pytest.mark.parametrize(("answers_only", "seen"), [(True, b"four"), (False, b"2+2=four")])
def test_an_answer_follows_its_question(tmp_path: Path, answers_only: bool, seen: bytes) -> None:
    row = {"text": "2+2=", "answer": "four"}
    (example,) = encoded(tmp_path, [row], target_field="answer", answers_only=answers_only).examples
    assert decode(example.ids) == b"2+2=four"
    assert example.ids[-1] == example.labels[-1] == 2
    assert len(example.labels) == len(example.ids)
    assert with_loss(example) == seen


def test_an_answer_of_seq2seq_is_a_sequence_of_its_own(tmp_path: Path) -> None:
    row = {"text": "2+2=", "answer": "four"}
    (example,) = encoded(tmp_path, [row], is_seq2seq=True, target_field="answer").examples
    assert (decode(example.ids), decode(example.labels)) == (b"2+2=", b"four")


@pytest.mark.parametrize(
    ("answers_only", "seen"),
    [
        (True, "yes</>nö</>"),
        (False, "<system>be short</><user>hé</><assistant>yes</><user>?</><assistant>nö</>"),
    ],
)
def test_the_answers_of_a_conversation_have_the_loss(
    tmp_path: Path, answers_only: bool, seen: str
) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (example,) = encoded(
        tmp_path,
        [{"chat": CHAT}],
        messages_field="chat",
        chat_template=str(tmp_path / "t.jinja"),
        answers_only=answers_only,
    ).examples
    assert with_loss(example) == seen.encode()
    whole = "<system>be short</><user>hé</><assistant>yes</><user>?</><assistant>nö</>"
    assert decode(example.ids) == whole.encode()


@pytest.mark.parametrize(
    ("labels", "given"), [((), [0, 1, 2]), (("no", "yes", "perhaps"), ["no", "yes", "perhaps"])]
)
def test_classes_are_numbers_or_names(
    tmp_path: Path, labels: tuple[str, ...], given: list[object]
) -> None:
    rows = [{"text": "x", "class": value} for value in given]
    found = encoded(tmp_path, rows, label_field="class", labels=labels)
    assert [example.label for example in found.examples] == [0, 1, 2]


@pytest.mark.parametrize("labels", ["[]", "['no', 'yes']"])
def test_a_classifier_has_as_many_classes_as_the_data(
    tmp_path: Path, labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = [0, 2] if labels == "[]" else ["no", "yes"]
    rows = [{"text": f"text {value}", "class": value} for value in values]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, data, model = prepare(
        "model.task=sequence-classification",
        "data.source=r.jsonl",
        "data.label_field=class",
        f"data.labels={labels}",
    )
    assert data.num_labels == model.config.num_labels == (3 if labels == "[]" else 2)  # type: ignore[union-attr]
    batch = next(iter(data.loader))
    assert batch["labels"].shape == (1,)
    assert float(model(**batch).loss.detach()) > 0


@pytest.mark.parametrize(
    ("trained", "evaluated", "count"), [([0, 1], [3], 4), ([2, 0], [1], 3)], ids=["more", "fewer"]
)
def test_classes_that_are_only_evaluated_on_count(
    tmp_path: Path,
    trained: list[int],
    evaluated: list[int],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert classes_of(trained, evaluated).num_labels == count


def test_a_single_class_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes a head of one output to fit numbers, by squared errors."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="which is 0 in all 3 documents; expected two classes"):
        classes_of([0, 0], [0])


def classes_of(trained: list[int], evaluated: list[int]) -> TrainingData:
    for name, values in (("t.jsonl", trained), ("e.jsonl", evaluated)):
        rows = [json.dumps({"text": f"text {n}", "class": n}) for n in values]
        Path(name).write_text("\n".join(rows))
    said = ("model.task=sequence-classification", "data.label_field=class")
    return load_data(tiny(*said, "data.source=t.jsonl", "evaluation.source=e.jsonl"))


LONG = [{"text": "abcdefgh"}, {"text": "x"}]


@pytest.mark.parametrize(
    ("overlong", "texts", "cut", "skipped"),
    [
        ("cut", [b"abc", b"x"], 1, 0),
        ("split", [b"abc", b"defg", b"h", b"x"], 0, 0),
        ("skip", [b"x"], 0, 1),
    ],
)
def test_what_becomes_of_a_document_that_is_too_long(
    tmp_path: Path, overlong: Any, texts: list[bytes], cut: int, skipped: int
) -> None:
    found = encoded(tmp_path, LONG, max_length=4, overlong=overlong)
    assert [decode(example.ids) for example in found.examples] == texts
    assert max(map(len, found.examples)) <= 4
    assert (found.num_cut, found.num_skipped) == (cut, skipped)


def test_an_answer_of_seq2seq_that_is_cut_counts(tmp_path: Path) -> None:
    rows = [
        {"text": "?", "answer": "a long answer"},
        {"text": "a long question", "answer": "no"},
        {"text": "a long question", "answer": "a long answer"},
        {"text": "?", "answer": "yes"},
    ]
    found = encoded(tmp_path, rows, is_seq2seq=True, target_field="answer", max_length=8)
    assert max(len(example.labels) for example in found.examples) == 8
    assert (found.num_cut, len(found.examples)) == (3, 4)


def test_a_document_whose_answer_is_cut_off_has_nothing_to_learn(tmp_path: Path) -> None:
    rows = [{"text": "a long question", "answer": "no"}, {"text": "?", "answer": "yes"}]
    found = encoded(tmp_path, rows, target_field="answer", max_length=8)
    assert [with_loss(example) for example in found.examples] == [b"yes"]
    assert found.num_skipped == 1
    with pytest.raises(ValueError, match="none of 1 documents is left: each is longer than"):
        encoded(tmp_path, rows[:1], target_field="answer", max_length=8)


BAD_ROWS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"text": "x", "answer": " "},
        {"target_field": "answer"},
        "rows.jsonl:1: the answer under 'answer' is empty, and an empty answer has no loss; remove",
    ),
    (
        {"text": "x"},
        {"target_field": "answer"},
        "rows.jsonl:1 has no field 'answer'; its fields are 'text': set data.target_field to the",
    ),
    (
        {"body": "x"},
        {},
        "rows.jsonl:1 has no field 'text'; its fields are 'body': set data.text_field to the one",
    ),
    (
        {"text": "x", "class": "maybe"},
        {"label_field": "class", "labels": ("no", "yes")},
        "rows.jsonl:1: the class is 'maybe'; expected one of data.labels: no, yes",
    ),
    (
        {"text": "x", "class": "no"},
        {"label_field": "class"},
        "rows.jsonl:1: the class is 'no'; expected a whole number from 0 to 65535 as numbers of",
    ),
    (
        {"chat": "hello"},
        {"messages_field": "chat"},
        'rows.jsonl:1: the conversation is "hello"; expected a list such as [{"role": "user"',
    ),
    (
        {"chat": [{"role": "robot", "content": "x"}]},
        {"messages_field": "chat"},
        'message 0 is {"role": "robot", "content": "x"}; expected a role, one of system, user',
    ),
    (
        {"chat": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
        {"messages_field": "chat"},
        "rows.jsonl:1, message 1: the answer is empty and has no loss; remove it, or fill it",
    ),
    (
        {"chat": [{"role": "user", "content": "x"}]},
        {"messages_field": "chat"},
        "rows.jsonl:1: nobody answers; expected at least one message of the role assistant",
    ),
    (
        {"chat": CHAT},
        {"messages_field": "chat"},
        "the tokenizer 'bytes' has no chat template; name a file with one by data.chat_template",
    ),
    (
        {"text": "abcdefgh"},
        {"max_length": 4, "overlong": "refuse"},
        "rows.jsonl:00000001 has 10 tokens, more than data.max_length (4); raise it, shorten",
    ),
    (
        {"text": "a", "class": 2**70},
        {"label_field": "class"},
        "rows.jsonl:1: the class is 1180591620717411303424; expected a whole number from 0 to 655",
    ),
    (
        {"text": "abcdefgh", "class": 0},
        {"max_length": 4, "overlong": "split", "label_field": "class"},
        "has 10 tokens and cannot be split, since its answer or class belongs to the whole",
    ),
]


@pytest.mark.parametrize(("row", "keys", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        encoded(tmp_path, [row], **keys)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refuses the conversation (no system role)"),
        ("{{ messages[-1].content }}", "does not write answer 2 behind what it writes of the"),
        ("{% for", "refuses the conversation"),
    ],
    ids=["raises", "only the last", "broken"],
)
def test_a_template_that_does_not_fit_is_named(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(ValueError, match=re.escape(message)):
        encoded(
            tmp_path,
            [{"chat": CHAT}],
            messages_field="chat",
            chat_template=str(tmp_path / "t.jinja"),
        )


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template 'nowhere.jinja' cannot be read"):
        encoded(tmp_path, [{"chat": CHAT}], messages_field="chat", chat_template="nowhere.jinja")
