"""Tokenizers: bytes, which need nothing, and those of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rematic.recipes import Recipe
from rematic.training import byte_tokens
from rematic.training.model_config import BYTE_MARKS, cannot_load, hub_options, source_of

BYTES = "bytes"
"""What a recipe calls the tokenizer that reads bytes."""

Span = tuple[int, int]
"""First character of a piece of text, and the one after its last."""


class Tokenizer(Protocol):
    """Turns text into ids."""

    name: str
    """What the recipe calls it."""
    pad_id: int
    """Fills short sequences."""
    mask_id: int | None
    """Stands for what is to be guessed; None where there is none."""
    num_tokens: int | None
    """Size of the vocabulary a model must have; None for that of bytes."""
    template: str | None
    """Jinja template of conversations; None where there is none."""
    special_ids: frozenset[int]
    """Marks, which are never to be guessed."""

    def marks(self) -> dict[str, int | None]:
        """What the config of a model with random weights says of the marks."""

    def variables(self) -> dict[str, str]:
        """Marks that a template may write, as text."""

    def encode(self, text: str) -> list[int]:
        """Ids of a whole text, with the marks of beginning and end."""

    def encode_pair(self, text: str, answer: str) -> tuple[list[int], list[int]]:
        """Ids of a text and of what follows it, together one sequence."""

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Ids of a rendered text, without further marks, and which lie in the given spans."""

    def replaceable(self) -> range:
        """Ids that may stand in for a masked one."""

    def saved(self) -> Any:  # noqa: ANN401 - untyped in transformers
        """What is saved beside weights; None where there is nothing."""


class ByteTokenizer:
    """One token a byte."""

    name = BYTES
    pad_id = byte_tokens.PAD_ID
    mask_id: int | None = byte_tokens.MASK_ID
    num_tokens: int | None = None
    template: str | None = None
    special_ids = frozenset({byte_tokens.PAD_ID, byte_tokens.BOS_ID, byte_tokens.EOS_ID})

    def marks(self) -> dict[str, int | None]:
        """The marks of bytes."""
        return dict(BYTE_MARKS)

    def variables(self) -> dict[str, str]:
        """None: marks are no bytes."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Beginning, bytes, end."""
        content = text.encode()
        return byte_tokens.encode(content, max_length=len(content) + 2)

    def encode_pair(self, text: str, answer: str) -> tuple[list[int], list[int]]:
        """Beginning and text; answer and end."""
        return self.encode(text)[:-1], self.encode(answer)[1:]

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """The bytes of each character are in a span if the character is."""
        ids: list[int] = []
        inside: list[bool] = []
        for position, character in enumerate(text):
            content = character.encode()
            ids += [byte + byte_tokens.BYTE_OFFSET for byte in content]
            inside += [_is_inside(position, position + 1, spans)] * len(content)
        return ids, inside

    def replaceable(self) -> range:
        """All bytes."""
        return range(byte_tokens.BYTE_OFFSET, byte_tokens.VOCABULARY_SIZE)

    def saved(self) -> None:
        """Nothing."""


class ModelTokenizer:
    """A tokenizer of transformers.

    Args:
        tokenizer: A fast one, which knows where in the text a token comes from.
        name: What the recipe calls it.

    Raises:
        ValueError: It is a slow one.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:  # noqa: ANN401 - untyped
        if not tokenizer.is_fast:
            raise ValueError(
                f"data.tokenizer {name!r} has no fast form; expected one with a tokenizer.json: "
                "convert it by transformers' AutoTokenizer.from_pretrained(..., use_fast=True)"
            )
        self._tokenizer = tokenizer
        self.name = name
        end = tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else (end if end is not None else 0)
        self.mask_id: int | None = tokenizer.mask_token_id
        self.num_tokens: int | None = len(tokenizer)
        self.template: str | None = tokenizer.chat_template
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)

    def marks(self) -> dict[str, int | None]:
        """The marks of the tokenizer."""
        return {
            "pad_token_id": self.pad_id,
            "bos_token_id": self._tokenizer.bos_token_id,
            "eos_token_id": self._tokenizer.eos_token_id,
            "cls_token_id": self._tokenizer.cls_token_id,
            "sep_token_id": self._tokenizer.sep_token_id,
        }

    def variables(self) -> dict[str, str]:
        """The special tokens by their names."""
        return {key: str(text) for key, text in self._tokenizer.special_tokens_map.items()}

    def encode(self, text: str) -> list[int]:
        """With the marks that the tokenizer adds, and its end."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        end = self._tokenizer.eos_token_id
        has_end = self._tokenizer.sep_token_id is not None and ids[-1:] == [
            self._tokenizer.sep_token_id
        ]
        return ids if end is None or has_end or ids[-1:] == [end] else [*ids, end]

    def encode_pair(self, text: str, answer: str) -> tuple[list[int], list[int]]:
        """The text with its beginning, the answer with its end."""
        end = self._tokenizer.eos_token_id
        before = self.encode(text)
        before = before[:-1] if end is not None and before[-1:] == [end] else before
        after: list[int] = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        return before, after if end is None else [*after, end]

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """A token is in a span if any of its characters is."""
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [_is_inside(start, stop, spans) for start, stop in made["offset_mapping"]]
        return made["input_ids"], inside

    def replaceable(self) -> range:
        """The whole vocabulary."""
        return range(len(self._tokenizer))

    def saved(self) -> Any:  # noqa: ANN401 - untyped in transformers
        """The tokenizer itself."""
        return self._tokenizer


def load_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer that a recipe names.

    Raises:
        ValueError: It cannot be had.
    """
    wanted, model = recipe.data.tokenizer, recipe.model
    if wanted == BYTES or (wanted == "auto" and not model.has_saved_weights):
        return ByteTokenizer()
    from transformers import AutoTokenizer

    if wanted == "auto":
        source, options = source_of(model), hub_options(model)
    else:
        folder = Path(wanted).expanduser()
        source = str(folder) if folder.is_dir() else wanted
        options = {"trust_remote_code": model.trust_remote_code}
    try:
        found = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # of hub, network, file system and transformers alike
        if wanted == "auto":
            raise ValueError(cannot_load("the tokenizer", model, error)) from error
        text = " ".join(str(error).split())[:400]
        raise ValueError(
            f"data.tokenizer {wanted!r} cannot be loaded ({type(error).__name__}: {text}); expected"
            " bytes, a folder with a tokenizer.json, or a name on the hub that this machine reaches"
        ) from error
    return ModelTokenizer(found, name=source)


def _is_inside(start: int, stop: int, spans: Sequence[Span]) -> bool:
    return any(start < last and first < stop for first, last in spans)
