from __future__ import annotations

import re
from pathlib import Path

import pytest

from rematic.recipes import DataConfig
from rematic.training.corpus import document_order, load_corpus
from rematic.training.documents import Corpus, Document


def test_the_embedded_corpus_is_real_text_of_many_lengths() -> None:
    corpus = load_corpus(DataConfig())
    sizes = sorted(len(document.text) for document in corpus.documents)
    names = [document.name for document in corpus.documents]
    assert len(corpus.documents) == 79
    assert 400_000 < sum(sizes) < 600_000
    assert sizes[0] < 300
    assert sizes[-1] > 50_000
    assert names == sorted(names)


def test_keeps_the_first_documents_by_name() -> None:
    whole = load_corpus(DataConfig()).documents
    assert load_corpus(DataConfig(max_documents=3)).documents == whole[:3]


def test_reads_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfsecond")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "lines.jsonl").write_text('{"body": "one"}\n\n{"body": "d\\u00e9ux"}\n')
    (tmp_path / "notes.md").write_text("not read")
    corpus = load_corpus(DataConfig(source=str(tmp_path), text_field="body"))
    assert [document.text for document in corpus.documents] == [
        b"one",
        "déux".encode(),
        b"second",
    ]
    assert load_corpus(DataConfig(source=str(tmp_path / "b.txt"))).documents == (
        Document(name="b.txt", text=b"second"),
    )


def test_the_same_data_elsewhere_has_the_same_hash(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text('{"text": "x"}')
    here, there = (
        load_corpus(DataConfig(source=str(tmp_path / folder))) for folder in ("here", "there")
    )
    assert here.sha256 == there.sha256


def test_lines_of_a_long_file_stay_in_order(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "line {n}"}}\n' for n in range(1, 12)))
    texts = [document.text for document in load_corpus(DataConfig(source=str(lines))).documents]
    assert texts == [f"line {n}".encode() for n in range(1, 12)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is an empty document (0 bytes of white space); expected text"),
        ("a.txt", b" \n\t", "a.txt is an empty document (3 bytes of white space)"),
        ("a.txt", b"ab\0c", "a.txt is binary (a NUL byte at position 2); expected text in UTF-8"),
        ("a.txt", b"caf\xe9", "a.txt is not UTF-8 (byte 0xe9 at position 3)"),
        ("a.csv", b"x", "ends in '.csv'; expected a .txt file (one document), a .jsonl file"),
        ("plain", b"x", "ends in 'nothing'; expected a .txt file"),
        (
            "a.jsonl",
            b"",
            "expected at least one: fill it, or name another data.source",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b'["x"]', "a.jsonl:1 is a JSON list; expected an object with the text under"),
        (
            "a.jsonl",
            b'\n{"body": "x", "id": 1}',
            "a.jsonl:2 has no field 'text'; its fields are 'body', 'id': set data.text_field",
        ),
        ("a.jsonl", b'{"text": 3}', "a.jsonl:1: field 'text' is a int; expected a string"),
        ("a.jsonl", b'{"text": ""}', "a.jsonl:1 is an empty document (0 bytes of white space)"),
        ("a.jsonl", b'{"text": "a\\u0000"}', "a.jsonl:1 is binary (a NUL byte at position 1)"),
        ("a.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair at character 0"),
        ("a.jsonl", b"\xff\xfe{", "a.jsonl:1 is not JSON"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_refuses_what_is_not_text(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_corpus(DataConfig(source=str(tmp_path / name)))
    assert str(tmp_path / name) in str(caught.value)


def test_refuses_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; expected 'pydoc_topics', or a path"):
        load_corpus(DataConfig(source=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match=r"holds no \.txt, \.jsonl or \.parquet file; put"):
        load_corpus(DataConfig(source=str(tmp_path)))


def test_the_hash_sees_every_byte_and_its_place() -> None:
    def corpus(*texts: bytes) -> Corpus:
        documents = tuple(Document(name=str(n), text=text) for n, text in enumerate(texts))
        return Corpus(source="x", documents=documents)

    same = [corpus(b"ab", b"c").sha256, corpus(b"ab", b"c").sha256]
    others = [corpus(b"a", b"bc").sha256, corpus(b"c", b"ab").sha256, corpus(b"ab", b"d").sha256]
    assert len(set(same)) == 1
    assert len({*same, *others}) == 4


def test_the_order_is_fixed_by_seed_and_epoch() -> None:
    first = document_order(79, seed=0, epoch=0, shuffle=True)
    assert first == document_order(79, seed=0, epoch=0, shuffle=True)
    assert sorted(first) == list(range(79))
    assert first[:6] == [50, 74, 47, 8, 24, 21]
    assert first != document_order(79, seed=0, epoch=1, shuffle=True)
    assert first != document_order(79, seed=1, epoch=0, shuffle=True)
    assert document_order(3, seed=0, epoch=0, shuffle=False) == [0, 1, 2]
