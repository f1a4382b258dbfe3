"""Writes conversations as text by a template, and finds the answers in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematic.training.documents import Message
from rematic.training.tokens import Span, Tokenizer


class ChatTemplate:
    """A Jinja template as transformers renders it: in a sandbox, without access to this process.

    Args:
        template: The template.
        variables: Marks that it may write, by name.
    """

    def __init__(self, template: str, *, variables: dict[str, str]) -> None:
        self._template = template
        self._variables = variables

    def render(self, messages: Sequence[Message], *, where: str) -> tuple[str, list[Span]]:
        """The text of a conversation, and the places of its answers.

        An answer is what the template adds after the mark with which an answer begins
        (`add_generation_prompt`): the words of the assistant and the mark of their end.

        Raises:
            ValueError: The template refuses the conversation, or writes it another way once the
                answer is known.
        """
        whole = self._write(messages, where=where)
        spans = []
        for at, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._write(messages[:at], where=where, begins_answer=True)
            after = self._write(messages[: at + 1], where=where)
            if not after.startswith(before) or not whole.startswith(after):
                raise ValueError(
                    f"{where}: the chat template does not write answer {at} where it leaves room "
                    "for it, so that it cannot be told from the rest; expected a template that "
                    "only appends: name one by data.chat_template, or set data.answers_only=false"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def text(self, messages: Sequence[Message], *, where: str) -> str:
        """The text alone, for any template."""
        return self._write(messages, where=where)

    def _write(
        self, messages: Sequence[Message], *, where: str, begins_answer: bool = False
    ) -> str:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its types are too narrow
        said: list[Any] = [{"role": one.role, "content": one.content} for one in messages]
        try:
            rendered, _ = render(
                conversations=[said],
                chat_template=self._template,
                add_generation_prompt=begins_answer,
                **self._variables,
            )
        except Exception as error:  # whatever a template raises
            text = " ".join(str(error).split())
            raise ValueError(
                f"{where}: the chat template refuses the conversation ({text}); change the "
                "conversation, or name another template by data.chat_template"
            ) from error
        return str(rendered[0])


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
