"""Head and loss that run in slices of the tokens: how many there are, and what a step then needs.

Of a loss in slices every event of a slice is linear in the share of a slice in the whole: in that
of the tokens, or where the weight of the head is trained, in that of the vocabulary. So two numbers
of slices tell all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rematic.cost.polynomial import Polynomial


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the loss of a model is sliced."""

    tile_tokens: int
    """Tokens in a slice."""

    vocabulary: int
    """Rows of the head."""

    is_trained: bool
    """Whether the head's weight needs a gradient: backward then slices the vocabulary as long as
    there are fewer tokens."""

    def num_tiles(self, tokens: int) -> int:
        """Returns the number of slices.

        Args:
            tokens: Batch size times length.
        """
        return max(1, -(-tokens // self.tile_tokens))

    def share(self, tokens: int, *, forward: bool) -> float:
        """Returns the share of a slice in the whole.

        Args:
            tokens: Batch size times length.
            forward: Whether it is a slice of forward.
        """
        if not forward and self.is_trained and tokens < self.vocabulary:
            return -(-self.vocabulary // self.num_tiles(tokens)) / self.vocabulary
        return min(1.0, self.tile_tokens / tokens)


_Pair = tuple[Polynomial, Polynomial]


@dataclass(frozen=True, kw_only=True)
class TiledEnvelope:
    """The largest of several sums of a polynomial and the share of a slice times another."""

    tiling: Tiling
    """How the loss is sliced."""

    forward: tuple[_Pair, ...]
    """Those of forward: what does not depend on the slices, and what does."""

    backward: tuple[_Pair, ...]
    """Those of backward."""

    @classmethod
    def through(
        cls,
        few: Sequence[Polynomial],
        many: Sequence[Polynomial],
        *,
        num_forward: int,
        tiling: Tiling,
    ) -> TiledEnvelope:
        """Makes one from events in the same order.

        Args:
            few: With `FEW_TILES` slices.
            many: With `MANY_TILES` slices.
            num_forward: How many of them are of forward.
            tiling: How the loss is sliced in real steps.
        """
        pairs = list(zip(few, many, strict=True))
        parts = pairs[:num_forward], pairs[num_forward:]
        forward, backward = (tuple(_solved(*p) for p in dict.fromkeys(part)) for part in parts)
        return cls(tiling=tiling, forward=forward, backward=backward)

    def __call__(self, batch: int, length: int) -> int:
        """Returns the largest value, at least 0."""
        highest = 0.0
        for pairs, forward in ((self.forward, True), (self.backward, False)):
            share = self.tiling.share(batch * length, forward=forward)
            for plain, sliced in pairs:
                highest = max(highest, plain(batch, length) + share * sliced(batch, length))
        return round(highest)

    def plus(self, num_bytes: int) -> TiledEnvelope:
        """Returns it with so much more everywhere."""
        added, nothing = Polynomial.constant(num_bytes), Polynomial.constant(0)

        def raised(pairs: tuple[_Pair, ...]) -> tuple[_Pair, ...]:
            return (*((plain + added, sliced) for plain, sliced in pairs), (added, nothing))

        return replace(self, forward=raised(self.forward), backward=raised(self.backward))


FEW_TILES, MANY_TILES = 4, 8
"""Numbers of slices that are traced."""

SHOWN_TILES = 2
"""Slices whose events are taken down: those after the first are like the second."""


def _solved(few: Polynomial, many: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Returns what does not depend on the share of a slice, and what is multiplied by it.

    few = plain + sliced / 4, many = plain + sliced / 8.
    """
    plain = many.times(2) - few
    return plain, (few - many).times(8)
