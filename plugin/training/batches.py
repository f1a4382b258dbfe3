"""Makes batches of sequences: padding, packed documents, masked tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rematic.recipes import DataConfig
from rematic.recipes.model_schema import Task
from rematic.training.examples import NO_LOSS, Example
from rematic.training.tokens import Tokenizer

Batch = Mapping[str, Tensor]
"""What a model is called with: `input_ids` (batch, seq), `labels`, and what they need."""

Row = tuple[int, ...]
"""Positions of the documents of one sequence: one, or several that are packed."""

_MASK_SHARE = 0.15
_KEPT, _REPLACED = 0.1, 0.1
"""Of the tokens that are to be guessed: shown as they are, and replaced (Devlin et al. 2019)."""


class BatchMaker:
    """Turns rows of documents into batches.

    A batch has an `attention_mask` only if it is padded. Packed documents have `position_ids` that
    start anew, by which transformers keeps them apart; the first token of each has no loss.

    Args:
        data: The data section of a recipe.
        task: What the model is trained for.
        tokenizer: Knows the marks.
        seed: Draws what is masked.
    """

    def __init__(self, data: DataConfig, *, task: Task, tokenizer: Tokenizer, seed: int) -> None:
        self._data = data
        self._task = task
        self._tokenizer = tokenizer
        self._seed = seed
        if task == "masked-lm" and tokenizer.mask_id is None:
            raise ValueError(
                f"model.task is masked-lm, but the tokenizer {tokenizer.name!r} has no mask token; "
                "expected one of an encoder: name it by data.tokenizer"
            )

    def padded_length(self, length: int) -> int:
        """`length` rounded up to the multiple that the recipe wants."""
        multiple = self._data.pad_to_multiple
        return -(-length // multiple) * multiple

    def make(
        self, rows: Sequence[Row], examples: Sequence[Example], *, epoch: int
    ) -> dict[str, Tensor]:
        """The batch of some rows in one epoch."""
        if self._data.packing:
            return self._packed(rows, examples)
        chosen = [examples[row[0]] for row in rows]
        ids = [one.ids for one in chosen]
        batch = {"input_ids": self._filled(ids, self._tokenizer.pad_id)}
        length = batch["input_ids"].shape[1]
        if any(len(one) < length for one in chosen):
            batch["attention_mask"] = self._filled([[1] * len(one) for one in chosen], 0)
        if self._task == "sequence-classification":
            batch["labels"] = torch.tensor([one.label for one in chosen], dtype=torch.long)
        elif self._task == "masked-lm":
            ids_shown, labels = self._masked(rows, chosen, epoch)
            batch["input_ids"] = self._filled(ids_shown, self._tokenizer.pad_id)
            batch["labels"] = self._filled(labels, NO_LOSS)
        else:
            labels = [list(one.labels) for one in chosen]
            batch["labels"] = self._filled(labels, NO_LOSS)
        return batch

    def _packed(self, rows: Sequence[Row], examples: Sequence[Example]) -> dict[str, Tensor]:
        ids, labels, positions = [], [], []
        for row in rows:
            documents = [examples[at] for at in row]
            ids.append([token for one in documents for token in one.ids])
            labels.append([label for one in documents for label in (NO_LOSS, *one.labels[1:])])
            positions.append([at for one in documents for at in range(len(one))])
        batch = {
            "input_ids": self._filled(ids, self._tokenizer.pad_id),
            "labels": self._filled(labels, NO_LOSS),
        }
        # padding is one more document
        length = batch["input_ids"].shape[1]
        filled = [[*row, *range(length - len(row))] for row in positions]
        return {**batch, "position_ids": torch.tensor(filled, dtype=torch.long)}

    def _filled(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        """A tensor (batch, seq) of rows that are filled up on the right."""
        length = self.padded_length(max(map(len, rows)))
        filled = [[*row, *[value] * (length - len(row))] for row in rows]
        return torch.tensor(filled, dtype=torch.long)

    def _masked(
        self, rows: Sequence[Row], chosen: Sequence[Example], epoch: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        pairs = [
            self._mask_one(one.ids, key=f"{self._seed}/{epoch}/{row}")
            for row, one in zip(rows, chosen, strict=True)
        ]
        return [ids for ids, _ in pairs], [labels for _, labels in pairs]

    def _mask_one(self, ids: Sequence[int], *, key: str) -> tuple[list[int], list[int]]:
        """Hides some tokens; drawn by a generator of its own, the same in a resumed run."""
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        chance = torch.rand(len(ids), generator=generator).tolist()
        fate = torch.rand(len(ids), generator=generator).tolist()
        others = self._tokenizer.replaceable()
        drawn = torch.randint(others.start, others.stop, (len(ids),), generator=generator).tolist()
        share = self._data.mask_share or _MASK_SHARE
        eligible = [at for at, one in enumerate(ids) if one not in self._tokenizer.special_ids]
        hidden = {at for at in eligible if chance[at] < share} or set(eligible[:1])
        mask_id = self._tokenizer.mask_id
        assert mask_id is not None, "the constructor has checked it"
        shown = list(ids)
        for at in hidden:
            if fate[at] >= _KEPT + _REPLACED:
                shown[at] = mask_id
            elif fate[at] >= _KEPT:
                shown[at] = drawn[at]
        return shown, [one if at in hidden else NO_LOSS for at, one in enumerate(ids)]


def make_batch(ids: Sequence[int]) -> dict[str, Tensor]:
    """A batch of one sequence, `input_ids` and `labels` of shape (1, seq)."""
    tokens = torch.tensor([list(ids)], dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
