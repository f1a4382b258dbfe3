"""Hands out batches, and can go on where a checkpoint stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from rematic.recipes.data_schema import Order
from rematic.training.batches import BatchMaker, Row
from rematic.training.corpus import document_order
from rematic.training.examples import Example
from rematic.training.packing import pack_documents


class BatchLoader:
    """Batches of the sequences of an epoch, at their own lengths.

    Iterating starts after the batches that are `finished`. That count, and not how many were
    handed out, is the state: a batch that was handed out but not trained comes again. Of several
    ranks each gets every so-manieth batch, and as many as the others.

    Args:
        examples: The sequences, in the order of their names.
        maker: Makes batches of them.
        order: How an epoch is ordered.
        seed: Draws the order of each epoch.
        batch_size: Sequences in a batch.
        capacity: Tokens that documents are packed into; None: each is a sequence.
        rank: Which process this is.
        num_ranks: Processes that train together.

    Raises:
        ValueError: There are fewer batches than processes.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        maker: BatchMaker,
        *,
        order: Order = "shuffled",
        seed: int = 0,
        batch_size: int = 1,
        capacity: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.examples = examples
        """The sequences before packing."""
        self.rows: list[Row] = [(at,) for at in range(len(examples))]
        """The documents of each sequence."""
        if capacity is not None:
            self.rows = pack_documents([len(one) for one in examples], capacity=capacity)
        self.finished = 0
        """Batches trained since the start of the run, over all epochs."""
        self._maker = maker
        self._order: Order = order
        self._seed = seed
        self._batch_size = batch_size
        self._rank = rank
        self._num_ranks = num_ranks
        if not len(self):
            raise ValueError(
                f"the data makes {-(-len(self.rows) // batch_size)} batches for {num_ranks} "
                "processes; expected at least one for each: lower data.batch_size or "
                "distributed.devices"
            )

    def __len__(self) -> int:
        return -(-len(self.rows) // self._batch_size) // self._num_ranks

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        epoch, position = divmod(self.finished, len(self))
        for rows in self.batches(epoch)[position:]:
            yield self.make(rows, epoch=epoch)

    @property
    def max_length(self) -> int:
        """Longest sequence as it is handed out, in tokens."""
        return self._maker.padded_length(max(map(self._length, self.rows)))

    def order(self, epoch: int) -> list[int]:
        """Positions of the sequences in the order of one epoch."""
        if self._order == "longest-first":
            return sorted(range(len(self.rows)), key=lambda at: -self._length(self.rows[at]))
        shuffle = self._order == "shuffled"
        return document_order(len(self.rows), seed=self._seed, epoch=epoch, shuffle=shuffle)

    def batches(self, epoch: int) -> list[list[Row]]:
        """The rows of each batch of this process in one epoch."""
        order, size = self.order(epoch), self._batch_size
        chunks = [order[at : at + size] for at in range(0, len(order), size)]
        mine = chunks[self._rank :: self._num_ranks][: len(self)]
        return [[self.rows[at] for at in chunk] for chunk in mine]

    def make(self, rows: Sequence[Row], *, epoch: int = 0) -> dict[str, Tensor]:
        """The batch of some rows."""
        return self._maker.make(rows, self.examples, epoch=epoch)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"finished": self.finished}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where the state was saved."""
        self.finished = state["finished"]

    def _length(self, row: Row) -> int:
        return sum(len(self.examples[at]) for at in row)
