"""Answers are found in what templates of many kinds make of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rematic.journal import read_journal
from rematic.recipes import DataConfig, load_recipe
from rematic.training.byte_tokens import decode
from rematic.training.chat import ChatTemplate
from rematic.training.corpus import load_corpus
from rematic.training.data import load_data
from rematic.training.documents import Message
from rematic.training.examples import NO_LOSS, encode_documents
from rematic.training.run import train
from rematic.training.tokens import ByteTokenizer
from tests.training.saved import save_tokenizer
from tests.training.small import tiny

THINKS = (  # of answers before the last question, what was thought is left out
    "{%- set last = namespace(at=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.at = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- set words = m.content.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- set thought = m.reasoning_content | default('') -%}"
    "{%- if '</think>' in m.content -%}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}"
    "{%- endif -%}"
    "{%- if m.role != 'assistant' -%}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
    "{%- elif loop.index0 > last.at and (loop.last or thought) -%}"
    "{{ '<|assistant|><think>' + thought + '</think>' + words + '<|end|>' }}"
    "{%- else -%}{{ '<|assistant|>' + words + '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
OPENS = (  # an answer is to begin with thinking, which no answer that is over shows
    "{%- for m in messages -%}"
    "{{ '<' + m.role + '>' + m.content.split('</think>')[-1] }}"
    "{{ '</s>' if m.role == 'assistant' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant><think>' }}{%- endif -%}"
)
MARKS = (
    "{%- for m in messages -%}{{ '<' + m.role + '>' }}"
    "{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content + '</s>' }}"
    "{%- endgeneration -%}{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
    "{{ '(end)' }}"
)
NO_MARK = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
ENDS_ONCE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ '</s>' if not add_generation_prompt else '<assistant>' }}"
)
STRICT = (  # no system, turns alternate, and the beginning is written
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def turns(*texts: str, roles: str = "ua") -> list[Message]:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    said = roles if len(roles) == len(texts) else roles * len(texts)
    return [
        Message(role=names[role], content=text) for role, text in zip(said, texts, strict=False)
    ]


def found(template: str, messages: Sequence[Message], **variables: str) -> list[tuple[str, ...]]:
    """Each text, its answers in square brackets."""
    shown = []
    for text, spans in ChatTemplate(template, variables=variables).render(messages, where="row 1"):
        pieces, done = [], 0
        for start, stop in spans:
            pieces += [text[done:start], f"[{text[start:stop]}]"]
            done = stop
        shown.append("".join([*pieces, text[done:]]))
    return shown


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            THINKS,
            turns("q", "a", "r", "<think>hm</think>b"),
            [
                "<|user|>q<|end|><|assistant|>[<think></think>a<|end|>]",
                "<|user|>q<|end|><|assistant|>a<|end|>"
                "<|user|>r<|end|><|assistant|>[<think>hm</think>b<|end|>]",
            ],
        ),
        (
            THINKS,
            turns("q", "<think>1</think>a", "<think>2</think>b", roles="uaa"),
            [
                "<|user|>q<|end|><|assistant|>[<think>1</think>a<|end|>]"
                "<|assistant|>[<think>2</think>b<|end|>]"
            ],
        ),
        (
            THINKS,
            turns("q", "a", "r"),
            ["<|user|>q<|end|><|assistant|>[<think></think>a<|end|>]"],
        ),
        (
            OPENS,
            turns("q", "<think>hm</think>a", "r", "b"),
            ["<user>q<assistant>[a</s>]<user>r<assistant>[b</s>]"],
        ),
        (
            MARKS,
            turns("q", "a", "r", "b"),
            ["<user>q<assistant>[a</s>]<user>r<assistant>[b</s>](end)"],
        ),
        (
            NO_MARK,
            turns("q", " a ", "r", "b"),
            ["user: q\nassistant: [a\n]user: r\nassistant: [b\n]"],
        ),
        (NO_MARK, turns("a", "r", "b", roles="aua"), ["assistant: [a\n]user: r\nassistant: [b\n]"]),
        (
            ENDS_ONCE,
            turns("q", "a", "r", "b"),
            ["<user>q<assistant>[a</s>]", "<user>q<assistant>a<user>r<assistant>[b</s>]"],
        ),
        (STRICT, turns("q", "a", "r", "b"), ["<s><user>q</><model>[a</>]<user>r</><model>[b</>]"]),
    ],
    ids=[
        "thinking",
        "two answers to one question",
        "a question without an answer",
        "answers that do not begin as they are to",
        "marks",
        "no mark of the beginning",
        "an answer first",
        "an end that moves",
        "the beginning",
    ],
)
def test_every_answer_is_found_once_where_the_model_has_to_write_it(
    template: str, messages: list[Message], expected: list[str]
) -> None:
    assert found(template, messages, bos_token="<s>") == expected


@pytest.mark.parametrize("template", [THINKS, OPENS, MARKS, ENDS_ONCE])
def test_words_that_look_like_marks_are_no_answers(template: str) -> None:
    """What a user writes has no loss, whatever it looks like."""
    forged = "<|assistant|>x<|end|><assistant>x</s>"
    texts = found(template, turns(forged, "a", forged, "b"))
    answers = [piece.partition("]")[0] for text in texts for piece in text.split("[")[1:]]
    assert not any("x" in answer for answer in answers)
    assert len(answers) == 2


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (STRICT, turns("s", "q", "a", roles="sua"), r"row 1: .*\(System role not supported\)"),
        (STRICT, turns("q", "a", "b", roles="uaa"), r"row 1: .*\(Roles must alternate\)"),
        ("{{ messages | length }}", turns("q", "a"), "does not write answer 1 behind what"),
        ("{{ messages[-1].content }}", turns("q", "a"), "does not write answer 1 behind what"),
    ],
    ids=["system", "alternate", "no words", "no question"],
)
def test_what_cannot_be_told_is_refused(
    template: str, messages: list[Message], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        found(template, messages, bos_token="<s>")


def rows(folder: Path, *chats: list[dict[str, Any]]) -> DataConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"chat": c}) + "\n" for c in chats))
    (folder / "t.jinja").write_text(THINKS)
    return DataConfig(
        source=str(folder / "rows.jsonl"),
        messages_field="chat",
        chat_template=str(folder / "t.jinja"),
    )


CHAT = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a", "reasoning_content": "hm", "weight": None},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "b"},
]


def test_the_sequences_of_a_conversation_have_each_answer_once(tmp_path: Path) -> None:
    data = rows(tmp_path, CHAT, CHAT[:2])
    documents = load_corpus(data).documents
    encoded = encode_documents(documents, data, ByteTokenizer(), is_seq2seq=False)
    answers = [decode([n for n in e.labels if n != NO_LOSS]).decode() for e in encoded.examples]
    first = "<think>hm</think>a<|end|>"
    assert answers == [first, "<think></think>b<|end|>", first]
    assert encoded.num_spread == 1
    assert [name.rpartition(":")[2] for name in encoded.names] == ["00000001"] * 2 + ["00000002"]
    assert (
        documents[0].parts() != load_corpus(rows(tmp_path, CHAT[2:], CHAT[:2])).documents[0].parts()
    )


def test_a_call_of_a_tool_is_an_answer(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    data = rows(
        tmp_path,
        [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}],
    )
    Path(data.chat_template or "").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }})"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    encoded = encode_documents(load_corpus(data).documents, data, ByteTokenizer(), is_seq2seq=False)
    (example,) = encoded.examples
    assert decode([n for n in example.labels if n != NO_LOSS]) == b"f(1)"


@pytest.mark.parametrize(("begins", "count"), [("{{ bos_token }} ", 1), ("", 0)])
def test_the_template_alone_writes_the_beginning(tmp_path: Path, begins: str, count: int) -> None:
    folder = save_tokenizer(tmp_path / "words", template=None, begins=True)
    data = rows(tmp_path, CHAT)
    (tmp_path / "t.jinja").write_text(
        begins + "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    )
    keys = ("messages_field=chat", f"source={data.source}", f"chat_template={data.chat_template}")
    wanted = [f"data.{key}" for key in (*keys, f"tokenizer={folder}")]
    (example,) = load_data(load_recipe("tiny-cpu", wanted)).loader.examples
    assert example.ids.count(1) == count
    assert len(example) == 8 + count


def test_the_log_says_that_conversations_became_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path, CHAT, CHAT[:2])
    monkeypatch.chdir(tmp_path)
    keys = ("messages_field=chat", f"source={data.source}", f"chat_template={data.chat_template}")
    train(tiny(*(f"data.{key}" for key in keys), "data.max_length=128"), show_progress=False)
    text = "rewrites earlier answers, so that 1 conversations became several sequences, 3 in all"
    assert text in capsys.readouterr().err
    (start,) = [
        event
        for event in read_journal(tmp_path / "runs" / "tiny-cpu" / "journal.jsonl")
        if event["event"] == "run_start"
    ]
    assert (start["documents"], start["documents_spread"]) == (3, 1)


def test_a_run_does_not_go_on_under_a_template_that_was_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(tmp_path, CHAT, CHAT[:2])
    monkeypatch.chdir(tmp_path)
    keys = ("messages_field=chat", f"source={data.source}", f"chat_template={data.chat_template}")
    recipe = tiny(*(f"data.{key}" for key in keys), "data.max_length=128", "training.max_steps=1")
    train(recipe, show_progress=False)
    train(recipe, resume="runs/tiny-cpu", show_progress=False)
    (tmp_path / "t.jinja").write_text(THINKS.replace("<|end|>", "<|done|>"))
    with pytest.raises(ValueError, match="cannot go on with other sequences than those of the run"):
        train(recipe, resume="runs/tiny-cpu", show_progress=False)
