"""Writes conversations as text by a template, and finds the answers in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rematic.training.documents import Message
from rematic.training.tokens import Span, Tokenizer

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What templates put around answers that have the loss; transformers reads it."""

_OTHER_WORDS = ("Yes.", "No.")
"""Two answers that begin with different letters, which show where a template puts words."""


class ChatTemplate:
    """A Jinja template as transformers renders it: in a sandbox, without access to this process.

    Args:
        template: The template.
        variables: Marks that it may write, by name.
    """

    def __init__(self, template: str, *, variables: dict[str, str]) -> None:
        self._template = template
        self._variables = variables

    def render(self, messages: Sequence[Message], *, where: str) -> list[tuple[str, list[Span]]]:
        """The texts of a conversation, and the places of its answers: each is in one text.

        One text is enough unless the template rewrites earlier answers once another question
        follows, as those do that leave out what was thought. Such an answer is in a text of the
        conversation up to it: where it stands as the model would have to write it.

        An answer is what the template marks by `{% generation %}`, or else what it adds after the
        mark with which an answer begins (`add_generation_prompt`): the words of the assistant and
        the mark of their end.

        Raises:
            ValueError: The template refuses the conversation, or where an answer is cannot be told.
        """
        if _MARKERS.search(self._template):
            whole, spans = self._write_marked(messages, where=where)
            if spans:
                return [(whole, spans)]
        left = {
            at: self._find_answer(messages, at, where=where)
            for at, message in enumerate(messages)
            if message.role == "assistant"
        }
        texts = []
        for stop in (len(messages), *(at + 1 for at in reversed(left))):
            if stop < len(messages) and stop - 1 not in left:
                continue
            whole = self._write(messages[:stop], where=where)
            found = {
                at: (start, len(text))
                for at, (text, start) in left.items()
                if at < stop and whole.startswith(text)
            }
            if found:
                texts.append((whole, list(found.values())))
                left = {at: answer for at, answer in left.items() if at not in found}
        return texts[::-1]

    def _find_answer(self, messages: Sequence[Message], at: int, *, where: str) -> tuple[str, int]:
        """The text up to the end of an answer, and where in it the answer begins."""
        text = self._write(messages[: at + 1], where=where)
        before = self._write(messages[:at], where=where) if at else ""
        begun = self._write(messages[:at], where=where, begins_answer=True) if at else ""
        if begun != before and text.startswith(begun):
            return text, len(begun)
        # the mark is none, or answers are not written behind it: then where the words begin
        others = [
            self._write([*messages[:at], replace(messages[at], content=words)], where=where)
            for words in _OTHER_WORDS
        ]
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*others, strict=False))
        shared = "".join(letter for letter, _ in pairs)
        if shared.startswith(before) and text.startswith(shared) and others[0] != others[1]:
            return text, len(shared)
        raise ValueError(
            f"{where}: the chat template does not write answer {at} behind what it writes of the "
            "messages before it, so that it cannot be told from the rest; expected a template that "
            "appends it or marks it by {% generation %}: name one by data.chat_template, or set "
            "data.answers_only=false"
        )

    def text(self, messages: Sequence[Message], *, where: str) -> str:
        """The text alone, for any template."""
        return self._write(messages, where=where)

    def _write(
        self, messages: Sequence[Message], *, where: str, begins_answer: bool = False
    ) -> str:
        return self._render(messages, where=where, add_generation_prompt=begins_answer)[0]

    def _write_marked(self, messages: Sequence[Message], *, where: str) -> tuple[str, list[Span]]:
        text, spans = self._render(messages, where=where, return_assistant_tokens_mask=True)
        return text, [(start, stop) for start, stop in spans if start < stop]

    def _render(
        self, messages: Sequence[Message], *, where: str, **options: bool
    ) -> tuple[str, list[Span]]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its types are too narrow
        try:
            texts, spans = render(
                conversations=[[message.to_plain() for message in messages]],
                chat_template=self._template,
                **options,
                **self._variables,
            )
        except Exception as error:  # whatever a template raises
            text = " ".join(str(error).split())
            raise ValueError(
                f"{where}: the chat template refuses the conversation ({text}); change the "
                "conversation, or name another template by data.chat_template"
            ) from error
        return str(texts[0]), [tuple(span) for span in spans[0]] if spans else []


def find_template(tokenizer: Tokenizer, file: str | None) -> ChatTemplate:
    """The template in a file, or that of the tokenizer.

    Raises:
        ValueError: There is none, or the file cannot be read.
    """
    if file is not None:
        try:
            template = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"data.chat_template {file!r} cannot be read ({error}); expected a text file with "
                "a Jinja template"
            ) from error
        return ChatTemplate(template, variables=tokenizer.variables())
    if tokenizer.template is None:
        raise ValueError(
            f"data.messages_field names conversations, but the tokenizer {tokenizer.name!r} has no "
            "chat template; name a file with one by data.chat_template, or a tokenizer of a chat "
            "model by data.tokenizer"
        )
    return ChatTemplate(tokenizer.template, variables=tokenizer.variables())
