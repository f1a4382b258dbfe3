"""The data of a recipe, from its source to the loaders."""

from __future__ import annotations

from dataclasses import dataclass

from rematic.recipes import DataConfig, Recipe
from rematic.training import byte_tokens
from rematic.training.batches import BatchMaker
from rematic.training.corpus import load_corpus
from rematic.training.documents import Corpus
from rematic.training.examples import Encoded, encode_documents
from rematic.training.loader import BatchLoader
from rematic.training.tokens import ByteTokenizer, Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a run trains on."""

    corpus: Corpus
    """The documents, those for evaluation among them."""
    tokenizer: Tokenizer
    """What made them ids."""
    loader: BatchLoader
    """Hands out the batches to train on."""
    evaluation: BatchLoader | None
    """Hands out the batches to evaluate on."""
    encoded: Encoded
    """What became of the documents that are trained on."""
    num_labels: int | None
    """Classes; None where the task has none."""

    @property
    def max_length(self) -> int:
        """Longest sequence of all, in tokens."""
        rest = 0 if self.evaluation is None else self.evaluation.max_length
        return max(self.loader.max_length, rest)

    def notices(self, data: DataConfig) -> list[str]:
        """What a person should know of what became of the documents.

        Args:
            data: The data section of the recipe.
        """
        texts, encoded = [], self.encoded
        if encoded.num_skipped and data.overlong != "skip":
            texts.append(
                f"{encoded.num_skipped} of {encoded.num_skipped + len(set(encoded.names))} "
                "documents are left out, since nothing in them that has a loss lies within "
                f"data.max_length ({data.max_length}); raise it, or shorten what comes before "
                "answers"
            )
        if encoded.num_spread:
            texts.append(
                f"the chat template rewrites earlier answers, so that {encoded.num_spread} "
                f"conversations became several sequences, {len(encoded.examples)} in all, each up "
                "to an answer that is as the model has to write it; a template with "
                "{% generation %} marks, named by data.chat_template, would need one sequence a "
                "conversation"
            )
        return texts

    @property
    def num_tokens(self) -> int | None:
        """Size of the vocabulary that the model needs; None for that of bytes."""
        return self.tokenizer.num_tokens


def load_data(recipe: Recipe, *, rank: int = 0, num_ranks: int = 1) -> TrainingData:
    """Reads and encodes the documents of a recipe.

    Args:
        recipe: The recipe.
        rank: Which process this is.
        num_ranks: Processes that train together.

    Raises:
        ValueError: Something of the data cannot be used; the message says where.
    """
    data, seed = recipe.data, recipe.training.seed
    tokenizer = load_tokenizer(recipe)
    if recipe.model.task == "masked-lm" and isinstance(tokenizer, ByteTokenizer):
        tokenizer.num_tokens = byte_tokens.MASK_ID + 1
    corpus = load_corpus(data)
    trained, held_out = _split(corpus, recipe)
    is_seq2seq = recipe.model.task == "seq2seq"
    encoded = encode_documents(trained.documents, data, tokenizer, is_seq2seq=is_seq2seq)
    maker = BatchMaker(data, task=recipe.model.task, tokenizer=tokenizer, seed=seed)
    loader = BatchLoader(
        encoded.examples,
        maker,
        order=data.order,
        seed=seed,
        batch_size=data.batch_size,
        capacity=data.max_length if data.packing else None,
        rank=rank,
        num_ranks=num_ranks,
    )
    evaluation = None
    if held_out is not None:
        kept = encode_documents(held_out.documents, data, tokenizer, is_seq2seq=is_seq2seq)
        evaluation = BatchLoader(kept.examples, maker, order="written")
    return TrainingData(
        corpus=corpus,
        tokenizer=tokenizer,
        loader=loader,
        evaluation=evaluation,
        encoded=encoded,
        num_labels=_num_labels(data, corpus, held_out),
    )


def _split(corpus: Corpus, recipe: Recipe) -> tuple[Corpus, Corpus | None]:
    """Documents to train on, and to evaluate on: every so-manieth, the last one among them."""
    evaluation = recipe.evaluation
    if evaluation.source is not None:
        held = load_corpus(
            recipe.data, source=evaluation.source, max_documents=evaluation.max_documents
        )
        return corpus, held
    if evaluation.holdout == 0:
        return corpus, None
    documents = corpus.documents
    count = round(evaluation.holdout * len(documents))
    if not 0 < count < len(documents):
        raise ValueError(
            f"evaluation.holdout is {evaluation.holdout}, which of {len(documents)} documents "
            f"leaves {count} for evaluation and {len(documents) - count} for training; expected "
            "at least one for each: change it, or name evaluation.source"
        )
    held_at = {(number + 1) * len(documents) // count - 1 for number in range(count)}
    held_out = [one for at, one in enumerate(documents) if at in held_at]
    trained = [one for at, one in enumerate(documents) if at not in held_at]
    return (
        Corpus(source=corpus.source, documents=tuple(trained)),
        Corpus(source=corpus.source, documents=tuple(held_out[: evaluation.max_documents])),
    )


def _num_labels(data: DataConfig, *corpora: Corpus | None) -> int | None:
    """Classes of all documents, those that are only evaluated on among them."""
    if data.label_field is None:
        return None
    documents = [one for corpus in corpora if corpus is not None for one in corpus.documents]
    count = len(data.labels) or max(one.label or 0 for one in documents) + 1
    if count == 1:
        raise ValueError(
            f"data.label_field is {data.label_field!r}, which is 0 in all {len(documents)} "
            "documents; expected two classes or more: transformers would fit a number to one"
        )
    return count
