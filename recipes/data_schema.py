"""What a recipe says of the data: where it comes from, and how it becomes batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rematic.recipes.field_checks import (
    instances,
    number_from_zero,
    one_of,
    positive_number,
    require,
    some_text,
    true_or_false,
    whole_number,
)

SourceFormat: TypeAlias = Literal["auto", "datasets"]
Overlong: TypeAlias = Literal["cut", "split", "skip", "refuse"]
Order: TypeAlias = Literal["shuffled", "longest-first", "written"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The documents to train on, and the batches made of them."""

    source: str = "pydoc_topics"
    """`pydoc_topics` (default: the standard library's texts), a path, or a name for `datasets`."""
    format: SourceFormat = "auto"
    """`auto` (default): .txt, .jsonl or .parquet files; `datasets`: the library of that name."""
    subset: str | None = None
    """Configuration of a dataset of the library; None (default): its only one."""
    split: str | None = None
    """Split of a dataset of the library; None (default): `train`."""
    text_field: str = "text"
    """Key or column that holds the text; default `text`."""
    target_field: str | None = None
    """Key or column of what the text is to be answered by; None (default): none."""
    messages_field: str | None = None
    """Key or column of a conversation, roles and contents; None (default): plain text."""
    label_field: str | None = None
    """Key or column of the class of a text; None (default): none."""
    labels: tuple[str, ...] = ()
    """Names of the classes in order, where label_field holds names; default: it holds numbers."""
    tokenizer: str = "auto"
    """`bytes`, a folder or a name on the hub; `auto` (default): the model's, or else bytes."""
    chat_template: str | None = None
    """File with a template for conversations; None (default): that of the tokenizer."""
    answers_only: bool = True
    """Whether only answers have a loss, in conversations and with target_field; default true."""
    max_length: int = 1024
    """Longest sequence in tokens, at least 2. Default 1024."""
    overlong: Overlong = "cut"
    """What becomes of a longer document: `cut` (default), `split`, `skip`, or an error."""
    max_documents: int | None = None
    """How many documents to use, from the first; None (default): all."""
    order: Order = "shuffled"
    """`shuffled` (default: each epoch anew, by training.seed), `longest-first` or `written`."""
    batch_size: int = 1
    """Sequences in a micro-batch, shorter ones padded; default 1."""
    packing: bool = False
    """Whether sequences are filled up with whole documents that do not see each other."""
    pad_to_multiple: int = 1
    """Sequences are padded to a multiple of so many tokens; default 1."""
    mask_share: float | None = None
    """Share of tokens that `masked-lm` is to guess; None (default): 0.15 there."""

    def __post_init__(self) -> None:
        some_text(self, "source", remedy="write pydoc_topics, a path, or a dataset's name")
        one_of(self, "format", choices=get_args(SourceFormat), remedy="write auto for files")
        some_text(self, "text_field", remedy="name the key that holds the text, such as text")
        for name in ("subset", "split", "target_field", "messages_field", "label_field"):
            some_text(self, name, optional=True, remedy="write a name, or null")
        instances(self, "labels", kind=str, remedy="write names such as [negative, positive]")
        require(
            self,
            "labels",
            len(self.labels) != 1 and len(set(self.labels)) == len(self.labels),
            expected="two names or more, each once",
            remedy="write every class once, such as [negative, positive]",
        )
        some_text(self, "tokenizer", remedy="write auto where unsure")
        some_text(self, "chat_template", optional=True, remedy="write a file, or null")
        true_or_false(self, "answers_only")
        whole_number(self, "max_length", minimum=2, remedy="write the longest sequence in tokens")
        one_of(self, "overlong", choices=get_args(Overlong), remedy="write cut where unsure")
        whole_number(
            self, "max_documents", minimum=1, optional=True, remedy="write null for all documents"
        )
        one_of(self, "order", choices=get_args(Order), remedy="write shuffled where unsure")
        whole_number(self, "batch_size", minimum=1, remedy="write 1 for one sequence")
        true_or_false(self, "packing")
        whole_number(self, "pad_to_multiple", minimum=1, remedy="write 1 for no padding")
        if self.mask_share is not None:
            positive_number(self, "mask_share", remedy="write a share such as 0.15")
            number_from_zero(self, "mask_share", below=1, remedy="write a share such as 0.15")
        self._refuse_without_effect()

    @property
    def has_answers(self) -> bool:
        """Whether a document has parts that answer others."""
        return self.messages_field is not None or self.target_field is not None

    def _refuse_without_effect(self) -> None:
        for name in ("subset", "split"):
            require(
                self,
                name,
                self.format == "datasets" or getattr(self, name) is None,
                expected="null, since files have none",
                remedy="write format: datasets, or remove it",
            )
        require(
            self,
            "messages_field",
            self.messages_field is None or self.target_field is None,
            expected="null, since target_field says where the answers are",
            remedy="remove one of the two",
        )
        require(
            self,
            "text_field",
            self.messages_field is None or self.text_field == DataConfig.text_field,
            expected="nothing, since messages_field says where all that is said is",
            remedy="remove one of the two",
        )
        require(
            self,
            "chat_template",
            self.chat_template is None or self.messages_field is not None,
            expected="null, since no messages_field names conversations",
            remedy="remove it, or write messages_field",
        )
        require(
            self,
            "answers_only",
            self.answers_only or self.has_answers,
            expected="true, since plain text has no answers",
            remedy="remove it, or write messages_field or target_field",
        )
        require(
            self,
            "labels",
            not self.labels or self.label_field is not None,
            expected="none, since no label_field says which one a text has",
            remedy="remove it, or write label_field",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The documents that are not trained on, and when their loss is taken."""

    source: str | None = None
    """As data.source, read with the keys of data; None (default): none, or `holdout`."""
    holdout: float = 0.0
    """Share of the documents of data that is kept for evaluation; default 0."""
    every_steps: int | None = None
    """Optimizer steps between evaluations; None (default): one after each epoch."""
    max_documents: int | None = None
    """How many documents to use, from the first; None (default): all."""

    def __post_init__(self) -> None:
        some_text(self, "source", optional=True, remedy="write a path, or null")
        number_from_zero(self, "holdout", below=1, remedy="write a share such as 0.05")
        require(
            self,
            "holdout",
            self.source is None or self.holdout == 0,
            expected=f"0, since source is {self.source!r}",
            remedy="remove one of the two",
        )
        for name in ("every_steps", "max_documents"):
            whole_number(self, name, minimum=1, optional=True, remedy="write null")
            require(
                self,
                name,
                self.is_on or getattr(self, name) is None,
                expected="null, since there is nothing to evaluate on",
                remedy="write source or holdout",
            )

    @property
    def is_on(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.source is not None or self.holdout > 0
