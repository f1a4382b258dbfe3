"""Hands out the documents one by one, and can go on where a checkpoint stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rematic.recipes import DataConfig
from rematic.training.byte_tokens import encode
from rematic.training.corpus import Corpus, document_order


class DocumentLoader:
    """Batches of one document each, at its own length, in the order of the epoch.

    Iterating starts after the batches that are `finished`. That count, and not how many were
    handed out, is the state: a batch that was handed out but not trained comes again.

    Args:
        documents: Token ids of each document, in the order of their names.
        seed: Draws the order of each epoch.
        shuffle: False keeps the order of the documents.
    """

    def __init__(self, documents: Sequence[Sequence[int]], *, seed: int, shuffle: bool) -> None:
        self.documents = documents
        """Token ids of each document."""
        self._seed = seed
        self._shuffle = shuffle
        self.finished = 0
        """Batches trained since the start of the run, over all epochs."""

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        epoch, position = divmod(self.finished, len(self))
        for index in self.order(epoch)[position:]:
            yield make_batch(self.documents[index])

    @property
    def max_length(self) -> int:
        """Longest document, in tokens."""
        return max(map(len, self.documents))

    def order(self, epoch: int) -> list[int]:
        """Positions of the documents in the order of one epoch."""
        return document_order(len(self), seed=self._seed, epoch=epoch, shuffle=self._shuffle)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"finished": self.finished}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where the state was saved."""
        self.finished = state["finished"]


def build_loader(corpus: Corpus, data: DataConfig, *, seed: int) -> DocumentLoader:
    """The loader of a corpus as a recipe's data section wants it."""
    documents = [encode(doc.text, max_length=data.max_length) for doc in corpus.documents]
    return DocumentLoader(documents, seed=seed, shuffle=data.order == "shuffled")


def make_batch(ids: Sequence[int]) -> dict[str, Tensor]:
    """A batch of one sequence, `input_ids` and `labels` of shape (1, seq)."""
    tokens = torch.tensor([ids], dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
